"""Continuous batching of single responses over a paged cache that holds each prompt once."""
