"""Our fused kernels: one launch a direction, any head dimension to 512, any GPU that Triton compiles for."""
