"""How many cache blocks a group may come to need, counted before it is admitted."""

# Shape letters: P prompt tokens, R response tokens, N responses.

from dataclasses import dataclass
from math import ceil

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
