"""Levels of stock flash kernels, merged by log-sum-exp."""
