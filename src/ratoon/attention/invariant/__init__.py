"""Attention in which a row's sums are the same bits in every batch: in training, in prefill and in decoding."""
