"""All that planning needs to know of a rollout group: lengths."""

# Shape letters: P prompt tokens, R response tokens, N responses of a group, G groups, Q responses of all groups.

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ratoon.types.rollouts import RolloutGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupShape:
    """Lengths of one prompt and its responses, in tokens."""

    prompt_id: str | int
    """Names the prompt in errors."""

    num_prompt_tokens: int
    """P >= 1."""

    response_lengths: tuple[int, ...]
    """[N], N >= 0; each >= 0."""

    def __post_init__(self) -> None:
        if self.num_prompt_tokens < 1 or min(self.response_lengths, default=0) < 0:
            raise ValueError(
                f"prompt {self.prompt_id!r}: a group has at least 1 prompt token and responses of at least 0, "
                f"got {self.num_prompt_tokens} and {self.response_lengths}"
            )

    @classmethod
    def of(cls, group: RolloutGroup) -> "GroupShape":
        return cls(
            prompt_id=group.prompt.id,
            num_prompt_tokens=group.prompt.num_tokens,
            response_lengths=group.response_lengths,
        )


@dataclass(frozen=True, slots=True, eq=False)
class ShapeTable:
    """The lengths of many groups as flat arrays, for sums over thousands of groups."""

    prompt_tokens_G: NDArray[np.int64]
    group_sizes_G: NDArray[np.int64]
    response_tokens_Q: NDArray[np.int64]
    """[Q] responses of all groups, group by group."""

    group_of_Q: NDArray[np.int64]

    @classmethod
    def of(cls, shapes: Sequence[GroupShape]) -> "ShapeTable":
        sizes_G = np.asarray([len(shape.response_lengths) for shape in shapes], np.int64)
        return cls(
            prompt_tokens_G=np.asarray([shape.num_prompt_tokens for shape in shapes], np.int64),
            group_sizes_G=sizes_G,
            response_tokens_Q=np.asarray([R for shape in shapes for R in shape.response_lengths], np.int64),
            group_of_Q=np.repeat(np.arange(sizes_G.size), sizes_G),
        )

    @property
    def rows_G(self) -> NDArray[np.int64]:
        """[G] rows of each whole group, its prompt once; 0 for a group without responses."""
        rows_G = np.where(self.group_sizes_G > 0, self.prompt_tokens_G, 0)
        np.add.at(rows_G, self.group_of_Q, self.response_tokens_Q)
        return rows_G

    @property
    def num_logical_tokens(self) -> int:
        """Tokens that separate sequences would hold."""
        return int((self.prompt_tokens_G * self.group_sizes_G).sum() + self.response_tokens_Q.sum())
