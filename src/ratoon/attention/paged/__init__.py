"""Attention of single new tokens over keys and values in blocks: a prompt's blocks are read once for all its responses."""
