"""The same kernels with Hopper's warps and copies laid out by hand: a warp that copies, two groups that compute."""
