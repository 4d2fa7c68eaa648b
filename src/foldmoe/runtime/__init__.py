"""What a running layer needs beside its weights: workspace, compiled kernels, the torch op."""
