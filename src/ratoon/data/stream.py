"""An endless, resumable order of prompts."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from ratoon.types.errors import UserError
from ratoon.types.rollouts import Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamState:
    """Where a stream stands. `dataclasses.asdict` and `StreamState(**values)` take it to JSON and back."""

    epoch: int
    position: int
    """Prompts of this epoch that were taken; less than the number of prompts."""

    fingerprint: str
    """Hash of the prompts and of how they are ordered: a state fits no other stream."""


class PromptStream:
    """Every prompt once an epoch, epoch after epoch; the order follows from `seed` and the epoch's number alone."""

    def __init__(self, prompts: Sequence[Prompt], *, seed: int, shuffle: bool) -> None:
        if not prompts:
            raise UserError("there is no prompt to train on; the data is empty")
        if seed < 0:
            raise UserError(f"the seed of a prompt stream must not be negative, got {seed}")
        self._prompts = tuple(prompts)
        self._seed = seed
        self._shuffle = shuffle
        self._fingerprint = self._compute_fingerprint()
        self._epoch = 0
        self._position = 0
        self._order = self._epoch_order(0)

    @property
    def num_prompts(self) -> int:
        return len(self._prompts)

    @property
    def epoch(self) -> int:
        """Number of the epoch that the next prompt belongs to, from 0."""
        return self._epoch

    def take(self, count: int) -> list[Prompt]:
        """The next `count` prompts, over as many epochs as that needs."""
        if count < 0:
            raise ValueError(f"cannot take {count} prompts; count must not be negative")
        taken: list[Prompt] = []
        while len(taken) < count:
            stop = min(self._position + count - len(taken), self.num_prompts)
            taken += [self._prompts[index] for index in self._order[self._position : stop]]
            self._move_to(self._epoch, stop)
        return taken

    def state(self) -> StreamState:
        """What `restore` needs to go on with the prompt that `take` would return next."""
        return StreamState(epoch=self._epoch, position=self._position, fingerprint=self._fingerprint)

    def restore(self, state: StreamState) -> None:
        """Go on where `state` was taken. Raises UserError if that was a stream of other prompts or another order."""
        if state.fingerprint != self._fingerprint:
            raise UserError(
                f"the checkpoint was made with other prompts, or in another order, than these {self.num_prompts:,}; "
                "restore the data, the seed and data.shuffle it was made with, or begin a new run"
            )
        if state.epoch < 0 or not 0 <= state.position <= self.num_prompts:
            raise UserError(
                f"the checkpoint's data position is damaged: epoch {state.epoch}, prompt {state.position} of "
                f"{self.num_prompts:,}; go back to an earlier checkpoint"
            )
        self._move_to(state.epoch, state.position)

    def _move_to(self, epoch: int, position: int) -> None:
        """An epoch's end is the next one's beginning, so that no state is exhausted."""
        if position == self.num_prompts:
            epoch, position = epoch + 1, 0
        if epoch != self._epoch:
            self._order = self._epoch_order(epoch)
        self._epoch, self._position = epoch, position

    def _epoch_order(self, epoch: int) -> list[int]:
        if not self._shuffle:
            return list(range(self.num_prompts))
        # NumPy promises to keep a bit generator's raw output, but not what permutation() makes of it
        bits = np.random.PCG64(np.random.SeedSequence([self._seed, epoch])).random_raw(self.num_prompts)
        return np.argsort(bits, kind="stable").tolist()

    def _compute_fingerprint(self) -> str:
        digest = hashlib.blake2b(f"{self._shuffle}".encode(), digest_size=16)
        if self._shuffle:
            digest.update(str(self._seed).encode())
        for prompt in self._prompts:
            digest.update(repr((prompt.id, prompt.num_tokens, prompt.answer)).encode())
            digest.update(prompt.token_ids.tobytes())
            digest.update(_stable_text(prompt.metadata).encode(errors="surrogatepass"))
        return digest.hexdigest()


def _stable_text(value: object) -> str:
    """`repr`, but the same for equal mappings and sets in every process."""
    match value:
        case Mapping():
            items = cast(Mapping[Any, Any], value).items()
            return f"{{{', '.join(sorted(f'{key!r}: {_stable_text(inner)}' for key, inner in items))}}}"
        case list() | tuple():
            return f"[{', '.join(map(_stable_text, cast(Sequence[Any], value)))}]"
        case set() | frozenset():
            return f"{{{', '.join(sorted(map(_stable_text, cast(set[Any], value))))}}}"
        case _:
            return repr(value)
