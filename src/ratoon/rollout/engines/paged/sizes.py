"""Sizes that memory depends on; no torch here."""

BLOCK_TOKENS = 64
"""Tokens of one cache block. A response begins in a block of its own, so half a block is lost with each, and with each
prompt; smaller blocks make for longer tables and shorter reads."""

STEPS_TOGETHER = 8
"""Tokens that a GPU draws before the host looks at them: looking takes about as long as drawing one. A response that
ends among them wastes half of them on average."""
