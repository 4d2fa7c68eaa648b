"""MoE layers with the shared expert folded into the routed experts launch."""
