"""Plain Triton: any CUDA or ROCm device; weights stay as stored. Importing this package does not import Triton."""
