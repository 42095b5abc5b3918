"""Whether the cache that a recipe caps can hold a response: asked before a model loads, as its engine asks it later."""

from ratoon.rollout.config import EngineName
from ratoon.types import ModelShape, Prompt


def check_cache(
    cache_tokens: int, engine: EngineName, shape: ModelShape, longest: Prompt, most_tokens: int, *, by_kernels: bool
) -> None:
    """Raise UserError where `rollout.cache_tokens` is too few for the longest prompt with a response of `most_tokens`.

    by_kernels: the engine `paged` decodes by ours, several tokens at a time.
    """
    if engine == "transformers":
        from ratoon.rollout.engines.cache_budget import CacheLayout

        CacheLayout.of_shape(shape).check_fits(cache_tokens, longest.id, longest.num_tokens, most_tokens)
    elif engine == "paged":
        from ratoon.rollout.engines.paged.holdings import Holdings
        from ratoon.rollout.engines.paged.sizes import BLOCK_TOKENS, STEPS_TOGETHER

        holdings = Holdings(BLOCK_TOKENS, spare_tokens=STEPS_TOGETHER - 1 if by_kernels else 0)
        holdings.check_fits(cache_tokens, longest.id, longest.num_tokens, most_tokens)
