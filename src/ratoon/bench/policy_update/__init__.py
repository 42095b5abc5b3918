"""A whole policy update: ours and its peers on the same work, checked before they are timed."""
