"""How many cache blocks a group may come to need, counted before it is admitted."""

# Shape letters: P prompt tokens, R response tokens, N responses.

from dataclasses import dataclass
from math import ceil, gcd

from ratoon.types import ModelShape, UserError

BLOCK_TOKENS = 16
"""Tokens of one cache block: small, since every response copies the block in which its prompt ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheLayout:
    """How a model's layers share the blocks of a paged cache."""

    block_tokens: int
    num_full: int
    """Layer groups with global attention; each takes a block of its own."""

    num_sliding: int
    """Layer groups with sliding-window attention; their blocks are never shared and end with the window."""

    window: int | None

    @classmethod
    def of_shape(cls, shape: ModelShape) -> "CacheLayout":
        """As continuous batching groups layers: groups of one kind, all as large as the largest common divisor."""
        windows = shape.windows or (None,) * shape.num_layers
        sliding = [window for window in windows if window is not None]
        num_full = len(windows) - len(sliding)
        per_group = gcd(num_full, len(sliding))
        return cls(
            block_tokens=BLOCK_TOKENS,
            num_full=num_full // per_group,
            num_sliding=len(sliding) // per_group,
            window=sliding[0] if sliding else None,
        )

    def check_fits(
        self, cache_tokens: int, prompt_id: str | int, num_prompt_tokens: int, max_response_tokens: int
    ) -> None:
        """Raise UserError where `cache_tokens` cannot hold even one response."""
        needed = self.blocks(num_prompt_tokens, max_response_tokens, 1)
        if needed > self.tokens_to_blocks(cache_tokens):
            raise UserError(
                f"prompt {prompt_id!r} of {num_prompt_tokens:,} tokens with a response of up to "
                f"{max_response_tokens:,} needs {self.blocks_to_tokens(needed):,} cache tokens, over "
                f"rollout.cache_tokens={cache_tokens:,}; raise it, lower rollout.max_response_tokens, or drop the "
                "prompt"
            )

    def blocks(self, num_prompt_tokens: int, max_response_tokens: int, group_size: int) -> int:
        """Most blocks that a group can hold at once."""
        return self.shared_blocks(num_prompt_tokens, group_size) + group_size * self.blocks_per_response(
            num_prompt_tokens, max_response_tokens, group_size
        )

    def shared_blocks(self, num_prompt_tokens: int, group_size: int) -> int:
        """Blocks that the responses hold together: those the prompt, less its last token, fills in global layers."""
        if group_size == 1:
            return 0
        return self.num_full * ((num_prompt_tokens - 1) // self.block_tokens)

    def blocks_per_response(self, num_prompt_tokens: int, max_response_tokens: int, group_size: int) -> int:
        """Most blocks that one response of the group holds for itself."""
        # The scheduler takes up to two blocks ahead of the last token.
        longest = (num_prompt_tokens + max_response_tokens + 1) // self.block_tokens + 2
        in_window = 0 if self.window is None else min(longest, ceil(self.window / self.block_tokens))
        full = self.num_full * longest - self.shared_blocks(num_prompt_tokens, group_size)
        return full + self.num_sliding * in_window

    def tokens_to_blocks(self, num_tokens: int) -> int:
        return num_tokens // self.block_tokens * (self.num_full + self.num_sliding)

    def blocks_to_tokens(self, num_blocks: int) -> int:
        return ceil(num_blocks / (self.num_full + self.num_sliding)) * self.block_tokens
