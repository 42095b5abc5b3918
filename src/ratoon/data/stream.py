"""An endless, resumable order of prompts."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np

from ratoon.data.interleaving import exact_shares, next_source
from ratoon.data.rows import SOURCE_KEY
from ratoon.types.errors import UserError
from ratoon.types.rollouts import Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamState:
    """Where a stream stands. `dataclasses.asdict` and `StreamState(**values)` take it to JSON and back."""

    epoch: int
    """How often as many prompts were taken as there are."""

    position: int
    """Prompts taken since; less than the number of prompts."""

    fingerprint: str
    """Hash of the prompts and of how they are ordered: a state fits no other stream."""

    taken: Mapping[str, int] = field(default_factory=dict[str, int])
    """By source, the prompts taken of it since the beginning; empty where no weights are set."""


class PromptStream:
    """Every prompt once an epoch, epoch after epoch; the order follows from `seed` and the epoch's number alone.

    With weights, every source is such a stream with epochs of its own, and they take turns by `next_source`.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        *,
        seed: int,
        shuffle: bool,
        weights: Mapping[str, float] | None = None,
    ) -> None:
        """weights: by source, as `PromptSplit.weights`; every prompt's metadata then names one of these sources."""
        if not prompts:
            raise UserError("there is no prompt to train on; the data is empty")
        if seed < 0:
            raise UserError(f"the seed of a prompt stream must not be negative, got {seed}")
        self._num_prompts = len(prompts)
        self._weights = dict(weights or {})
        by_source: dict[str, list[Prompt]] = {name: [] for name in self._weights or ("",)}
        for prompt in prompts:
            name = prompt.metadata.get(SOURCE_KEY) if self._weights else ""
            if name not in by_source:
                raise ValueError(
                    f"prompt {prompt.id!r} is of source {name!r}, which has no weight among {self._weights}"
                )
            by_source[name].append(prompt)
        for name, own in by_source.items():
            if not own:
                raise UserError(f'source "{name}" has no prompt to train on; remove it, or bring more data')
        self._shares = exact_shares(list(self._weights.values()) or [1.0])
        self._names = tuple(by_source)
        self._pools = tuple(
            _Pool(own, seed=seed, salt=index, shuffle=shuffle) for index, own in enumerate(by_source.values())
        )
        self._fingerprint = self._compute_fingerprint(prompts, seed=seed, shuffle=shuffle)

    @property
    def num_prompts(self) -> int:
        return self._num_prompts

    @property
    def epoch(self) -> int:
        """How often as many prompts were taken as there are; without weights, that of the next prompt, from 0."""
        return self._num_taken // self.num_prompts

    @property
    def passes(self) -> Mapping[str, float]:
        """By source, how often its prompts were taken so far; empty where no weights are set."""
        pairs = zip(self._names, self._pools, strict=True)
        return {name: pool.num_taken / pool.num_prompts for name, pool in pairs} if self._weights else {}

    def take(self, count: int) -> list[Prompt]:
        """The next `count` prompts, over as many epochs as that needs."""
        if count < 0:
            raise ValueError(f"cannot take {count} prompts; count must not be negative")
        return [self._take_one() for _ in range(count)]

    def state(self) -> StreamState:
        """What `restore` needs to go on with the prompt that `take` would return next."""
        epoch, position = divmod(self._num_taken, self.num_prompts)
        pairs = zip(self._names, self._pools, strict=True)
        return StreamState(
            epoch=epoch,
            position=position,
            fingerprint=self._fingerprint,
            taken={name: pool.num_taken for name, pool in pairs} if self._weights else {},
        )

    def restore(self, state: StreamState) -> None:
        """Go on where `state` was taken. Raises UserError if that was a stream of other prompts or another order."""
        if state.fingerprint != self._fingerprint:
            raise UserError(
                f"the checkpoint was made with other prompts, or in another order, than these {self.num_prompts:,}; "
                "restore the data, the seed, data.shuffle and the weights it was made with, or begin a new run"
            )
        total = state.epoch * self.num_prompts + state.position
        taken = [state.taken.get(name, -1) for name in self._names] if self._weights else [total]
        is_on_track = all(abs(count - total * share) < 1 for count, share in zip(taken, self._shares, strict=True))
        if state.epoch < 0 or not 0 <= state.position <= self.num_prompts or sum(taken) != total or not is_on_track:
            raise UserError(
                f"the checkpoint's data position is damaged: epoch {state.epoch}, prompt {state.position} of "
                f"{self.num_prompts:,}{f', {dict(state.taken)} by source' if self._weights else ''}; go back to an "
                "earlier checkpoint"
            )
        for pool, count in zip(self._pools, taken, strict=True):
            pool.num_taken = count

    @property
    def _num_taken(self) -> int:
        return sum(pool.num_taken for pool in self._pools)

    def _take_one(self) -> Prompt:
        if len(self._pools) == 1:
            return self._pools[0].take_one()
        return self._pools[next_source([pool.num_taken for pool in self._pools], self._shares)].take_one()

    def _compute_fingerprint(self, prompts: Sequence[Prompt], *, seed: int, shuffle: bool) -> str:
        digest = hashlib.blake2b(f"{shuffle}".encode(), digest_size=16)
        if shuffle:
            digest.update(str(seed).encode())
        if self._weights:
            digest.update(repr(self._weights).encode())
        for prompt in prompts:
            digest.update(repr((prompt.id, prompt.num_tokens, prompt.answer)).encode())
            digest.update(prompt.token_ids.tobytes())
            digest.update(_stable_text(prompt.metadata).encode(errors="surrogatepass"))
        return digest.hexdigest()


class _Pool:
    """The prompts of one source, each once an epoch."""

    def __init__(self, prompts: Sequence[Prompt], *, seed: int, salt: int, shuffle: bool) -> None:
        """salt: sources shuffle differently; that of the only or first source is 0."""
        self._prompts = tuple(prompts)
        self._seed = seed
        self._salt = salt
        self._shuffle = shuffle
        self._epoch = -1
        self._order: list[int] = []
        self.num_taken = 0

    @property
    def num_prompts(self) -> int:
        return len(self._prompts)

    def take_one(self) -> Prompt:
        """An epoch's end is the next one's beginning, so that no state is exhausted."""
        epoch, position = divmod(self.num_taken, self.num_prompts)
        if epoch != self._epoch:
            self._epoch, self._order = epoch, self._epoch_order(epoch)
        self.num_taken += 1
        return self._prompts[self._order[position]]

    def _epoch_order(self, epoch: int) -> list[int]:
        if not self._shuffle:
            return list(range(self.num_prompts))
        entropy = [self._seed, epoch, self._salt] if self._salt else [self._seed, epoch]
        # NumPy promises to keep a bit generator's raw output, but not what permutation() makes of it
        bits = np.random.PCG64(np.random.SeedSequence(entropy)).random_raw(self.num_prompts)
        return np.argsort(bits, kind="stable").tolist()


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
