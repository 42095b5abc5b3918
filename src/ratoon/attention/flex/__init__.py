"""FlexAttention: the forest's rule as a mask that torch compiles into one kernel, on Triton or FlashAttention-4."""
