"""Device code of the Triton backend, in the order a layer runs it: prepare (routing, activations), gemm, combine."""
