"""Log-probability and entropy of scored tokens, straight from hidden states.

Over the whole vocabulary: `entry` is the public call and its place in autograd; `scoring` goes through the vocabulary
forward and `gradients` backward, both over the tiles of logits that `projection` makes; `tiling` says how large a tile
is; on a GPU `tile_kernels` does a tile's elementwise work in one pass. Over the tokens that truncated sampling kept:
`support` is the public call, `kept_sets` what was kept, and `kept_pairs` evaluates logits and gradients of few of them;
for many, `LinearLogprob` masks the others. `transform` says what a logit is and `checks` what is refused, alike for
both.
"""
