"""What a rollout raises when it cannot deliver."""

TESTED_TRANSFORMERS = ">=5.17,<5.18"
"""Versions whose continuous batching the `transformers` engine was tested with."""


class RolloutError(RuntimeError):
    """Responses that were asked for cannot be delivered; `__cause__` holds the engine's own error.

    The engine stays usable unless the message says it is closed.
    """


class NonFiniteLogitsError(RolloutError):
    """The policy itself is at fault: its logits are NaN or infinite, so no token can be drawn."""


class RolloutStalledError(RolloutError, TimeoutError):
    """No token appeared for `rollout.timeout_s`; the message names what was waited for."""
