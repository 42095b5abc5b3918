"""Which cached keys each request of one forward pass reads."""

# Shape letters: B single-token requests, U prompts they continue, N most of them to one prompt, T keys (padded to the
# longest).

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Slots = NDArray[np.int64]
"""Rows of a key tensor, in logical order."""


@dataclass(frozen=True, slots=True)
class Request:
    """What one request reads in the layers of one kind."""

    num_queries: int
    slots: Slots
    """Of every key, the queries' own included."""

    prompt: object = None
    """Requests with equal `prompt` read the same first `num_shared` slots."""

    num_shared: int = 0


@dataclass(frozen=True, slots=True)
class SharedReads:
    """Keys that the single-token requests of one prompt read together, stored once."""

    slots_UT: Tensor
    """[U, T] int64; 0 beyond the last."""

    mask_UT: Tensor
    """[U, T] bool. Whether a slot holds a key."""

    members_UN: Tensor
    """[U, N] int64. The requests, as indices in [0, B); 0 where a prompt has fewer."""

    prompt_of_B: Tensor
    """[B] int64."""

    place_of_B: Tensor
    """[B] int64. Index of each request in `members_UN`, flattened."""


@dataclass(frozen=True, slots=True)
class LayerReads:
    """What the layers of one kind read."""

    rows_B: Tensor
    """[B] int64. Query rows of the requests with one query token."""

    slots_BT: Tensor
    """[B, T] int64. The keys each of them reads by itself; 0 beyond the last."""

    mask_BT: Tensor
    """[B, T] bool. Whether a slot holds a key."""

    shared: SharedReads | None
    """None where nothing is shared."""

    longer: tuple[tuple[int, int, Tensor], ...]
    """(first row, end row, slots [T]) of each request with more query tokens."""

    @classmethod
    def plan(cls, requests: Iterable[Request], device: torch.device) -> "LayerReads":
        """requests: in the order of their query rows."""
        singles: list[Request] = []
        rows: list[int] = []
        longer: list[tuple[int, int, Tensor]] = []
        row = 0
        for request in requests:
            if request.num_queries == 1:
                singles.append(request)
                rows.append(row)
            elif request.num_queries > 1:
                longer.append((row, row + request.num_queries, torch.from_numpy(request.slots).to(device)))
            row += request.num_queries
        slots_BT, mask_BT = _padded([request.slots[request.num_shared :] for request in singles], device)
        return cls(
            rows_B=torch.tensor(rows, dtype=torch.int64, device=device),
            slots_BT=slots_BT,
            mask_BT=mask_BT,
            shared=_shared_reads(singles, device),
            longer=tuple(longer),
        )


@dataclass(frozen=True, slots=True)
class BatchReads:
    """The reads of one forward pass."""

    by_group: tuple[LayerReads, ...]
    """One for each of the cache's groups of layers. Slots of global layers are rows of the cache; slots of sliding
    layers are rows of what the cache returns for the batch: request after request, its window and the new keys."""


def _shared_reads(singles: Sequence[Request], device: torch.device) -> SharedReads | None:
    if not any(request.num_shared for request in singles):
        return None
    members: dict[object, list[int]] = {}
    for index, request in enumerate(singles):
        members.setdefault(request.prompt, []).append(index)
    width = max(len(indices) for indices in members.values())
    members_UN = np.zeros((len(members), width), np.int64)
    prompt_of_B = np.zeros(len(singles), np.int64)
    place_of_B = np.zeros(len(singles), np.int64)
    for prompt, indices in enumerate(members.values()):
        members_UN[prompt, : len(indices)] = indices
        prompt_of_B[indices] = prompt
        place_of_B[indices] = prompt * width + np.arange(len(indices))
    firsts = [singles[indices[0]] for indices in members.values()]
    slots_UT, mask_UT = _padded([request.slots[: request.num_shared] for request in firsts], device)
    return SharedReads(
        slots_UT=slots_UT,
        mask_UT=mask_UT,
        members_UN=torch.from_numpy(members_UN).to(device),
        prompt_of_B=torch.from_numpy(prompt_of_B).to(device),
        place_of_B=torch.from_numpy(place_of_B).to(device),
    )


def _padded(ragged: Sequence[Slots], device: torch.device) -> tuple[Tensor, Tensor]:
    """[len(ragged), longest] slots, zeros beyond each one's end, and the mask of what is held."""
    lengths = np.array([slots.size for slots in ragged], np.int64)
    mask = np.arange(lengths.max(initial=0))[None] < lengths[:, None]
    padded = np.zeros(mask.shape, np.int64)
    if ragged:
        padded[mask] = np.concatenate(ragged)
    return torch.from_numpy(padded).to(device), torch.from_numpy(mask).to(device)
