"""Which models the in-process engines can serve."""

from transformers import PreTrainedModel

from ratoon.models.settings import setting
from ratoon.types import UserError


def check_layers(model: PreTrainedModel) -> None:
    """Raise UserError for layers whose state is not the keys and values of global or sliding-window attention."""
    kinds = setting(model.config.get_text_config(), "layer_types") or ()
    unknown = sorted(set(kinds) - {"full_attention", "sliding_attention"})
    if unknown:
        raise UserError(
            f"{type(model).__name__} has layers of kind {', '.join(unknown)}, which the in-process engine cannot "
            "cache; it takes global and sliding-window attention"
        )
