"""Log-probability and entropy of scored tokens, straight from hidden states.

`entry` is the public call, its checks and its place in autograd; `scoring` goes through the vocabulary forward and
`gradients` backward, both over the tiles of logits that `projection` makes. `transform` says what a logit is, `tiling`
how large a tile is.
"""
