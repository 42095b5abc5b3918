"""Reading transformers configurations, whose families name one thing differently."""

from typing import Any

from transformers import PreTrainedConfig


def setting(config: PreTrainedConfig, *names: str) -> Any:
    """The first of `names` that the configuration has and that is not None; None where there is none.

    Configurations of different families share no type that tells which fields they have.
    """
    for name in names:
        # hasattr also follows the family's own names (n_embd for hidden_size).
        if hasattr(config, name):
            value = getattr(config, name)
            if value is not None:
                return value
    return None
