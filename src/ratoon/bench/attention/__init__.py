"""Attention alone: our implementations and their peers on the same work, checked before they are timed."""
