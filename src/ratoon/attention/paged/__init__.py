"""Attention of new tokens over keys in blocks: a prompt's are read once for all its responses."""
