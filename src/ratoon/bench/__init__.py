"""Measurements of our parts beside their peers, in one process, with a correctness check first."""
