"""What a recipe asks of a rollout and its model cannot give, whatever the engine."""

from ratoon.rollout.config import RolloutConfig
from ratoon.types import ModelShape, UserError


def check_model(config: RolloutConfig, shape: ModelShape) -> None:
    """Raise UserError for routes of a model without experts."""
    if config.return_routed_experts:
        check_has_experts(shape)


def check_batch_invariant(config: RolloutConfig) -> None:
    """Raise UserError where the log-probs of a batch-invariant model (`model.batch_invariant`) would not be its own."""
    if config.engine not in ("auto", "paged"):
        raise UserError(
            f'model.batch_invariant needs rollout.engine = "paged", which runs the trainer\'s own kernels, and it is '
            f'"{config.engine}"; set rollout.engine to "paged", or model.batch_invariant to false'
        )
    for name, whole in (("top_p", 1.0), ("top_k", 0), ("min_p", 0.0)):
        if getattr(config, name) != whole:
            raise UserError(
                f"model.batch_invariant is for draws from the whole vocabulary, and rollout.{name} = "
                f"{getattr(config, name)} cuts it; leave rollout.{name} out, or set model.batch_invariant to false"
            )


def check_has_experts(shape: ModelShape) -> None:
    """Raise UserError for a dense model."""
    if not shape.num_experts:
        raise UserError(
            "rollout.return_routed_experts asks for the experts that the router chose, and the model is dense: it has "
            "none; leave it out"
        )
