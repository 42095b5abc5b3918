"""Log-probability and entropy of scored tokens, straight from hidden states.

`entry` is the public call and checks its input, `chunked` computes it tile by tile with its own backward,
`transform` says how projections become logits, `tiling` how large a tile is.
"""
