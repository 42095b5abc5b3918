"""Hypothesis without a deadline: the first call of torch or NumPy on a busy machine is slow, not wrong."""

from hypothesis import settings

settings.register_profile("no_deadline", deadline=None)
settings.load_profile("no_deadline")
