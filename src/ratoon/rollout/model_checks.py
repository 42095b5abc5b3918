"""What a recipe asks of a rollout and its model cannot give, whatever the engine."""

from ratoon.rollout.config import RolloutConfig
from ratoon.types import ModelShape, UserError


def check_model(config: RolloutConfig, shape: ModelShape) -> None:
    """Raise UserError for routes of a model without experts."""
    if config.return_routed_experts:
        check_has_experts(shape)


def check_has_experts(shape: ModelShape) -> None:
    """Raise UserError for a dense model."""
    if not shape.num_experts:
        raise UserError(
            "rollout.return_routed_experts asks for the experts that the router chose, and the model is dense: it has "
            "none; leave it out"
        )
