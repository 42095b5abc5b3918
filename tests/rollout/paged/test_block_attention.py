"""Attention over blocks against one softmax a query in float64."""

# Shape letters: B rows that decode, U prompts, X blocks of one table row, H query heads, K key heads, D head dim.

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ratoon.attention.kernel import Scoring
from ratoon.rollout.engines.paged.block_attention import LayerRows
from ratoon.rollout.engines.paged.block_cache import LayerCache
from ratoon.rollout.engines.paged.gathered_decode import GatheredDecode
from ratoon.rollout.engines.paged.prefill import Prefill
from ratoon.rollout.engines.paged.runner import DecodeRows, PrefillPiece

CPU = torch.device("cpu")
NUM_BLOCKS = 40
H, K, D, DV = 6, 2, 5, 3


def make_rows(rng: np.random.Generator, block_tokens: int) -> DecodeRows:
    """Up to four prompts, each continued by up to four responses, in blocks that stand anywhere."""
    num_prompts = int(rng.integers(1, 5))
    members = rng.integers(1, 5, num_prompts)
    num_prompt_keys = rng.integers(1, 3 * block_tokens + 1, num_prompts)
    num_own_keys = rng.integers(1, 2 * block_tokens + 1, members.sum())
    blocks = iter(rng.permutation(NUM_BLOCKS).tolist())

    def table(num_keys: np.ndarray) -> np.ndarray:
        sizes = -(-num_keys // block_tokens)
        # What stands behind a row's last block must not matter.
        rows = rng.integers(0, NUM_BLOCKS, (sizes.size, sizes.max()))
        for row, size in zip(rows, sizes, strict=True):
            row[:size] = [next(blocks) for _ in range(size)]
        return rows.astype(np.int32)

    return DecodeRows(
        token_B=np.zeros(members.sum(), np.int64),
        prompt_of_B=np.repeat(np.arange(num_prompts), members).astype(np.int32),
        prompt_table_UX=table(num_prompt_keys),
        num_prompt_keys_U=num_prompt_keys.astype(np.int32),
        own_table_BX=table(num_own_keys),
        num_own_keys_B=num_own_keys.astype(np.int32),
    )


def cells(table_X: np.ndarray, num_keys: int, block_tokens: int) -> list[tuple[int, int]]:
    return [(int(table_X[key // block_tokens]), key % block_tokens) for key in range(num_keys)]


@dataclass(frozen=True)
class Rule:
    """What a layer does to its scores."""

    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks_H: Tensor | None = None

    def rows(self, q_RHD: Tensor, k_RHD: Tensor, v_RHE: Tensor) -> LayerRows:
        scoring = Scoring(softmax_scale=self.scale, softcap=self.softcap)
        return LayerRows(
            q_RHD=q_RHD, k_RHD=k_RHD, v_RHE=v_RHE, sinks_H=self.sinks_H, scoring=scoring, window=self.window
        )


RULES = [
    Rule(0.4),
    Rule(0.3, window=3),
    Rule(0.4, softcap=1.5),
    Rule(0.4, window=4, softcap=1.5, sinks_H=torch.linspace(-1, 2, H)),
]


def one_query(q_HD: Tensor, k_TKD: Tensor, v_TKD: Tensor, rule: Rule) -> Tensor:
    """[H, Dv] float64. The query is at the last key's position."""
    if rule.window is not None:
        k_TKD, v_TKD = k_TKD[-rule.window :], v_TKD[-rule.window :]
    out = []
    for head in range(H):
        key_head = head // (H // K)
        scores_T = k_TKD[:, key_head].double() @ q_HD[head].double() * rule.scale
        if rule.softcap is not None:
            scores_T = torch.tanh(scores_T / rule.softcap) * rule.softcap
        weights_T = scores_T.exp()
        total = weights_T.sum() + (0 if rule.sinks_H is None else rule.sinks_H[head].double().exp())
        out.append(weights_T @ v_TKD[:, key_head].double() / total)
    return torch.stack(out)


@pytest.mark.parametrize("rule", RULES)
@given(seed=st.integers(0, 2**32 - 1), block_tokens=st.integers(1, 4))
@settings(max_examples=20, deadline=None)
def test_decode_is_one_softmax_over_prompt_and_own_keys(rule: Rule, seed: int, block_tokens: int):
    rows = make_rows(np.random.default_rng(seed), block_tokens)
    generator = torch.Generator().manual_seed(seed)
    q_BHD = torch.randn(rows.token_B.size, H, D, generator=generator)
    layer = LayerCache(*(torch.randn(NUM_BLOCKS, K, block_tokens, width, generator=generator) for width in (D, DV)))
    k_BKD, v_BKD = (torch.randn(rows.token_B.size, K, width, generator=generator) for width in (D, DV))
    attention = GatheredDecode(rows, block_tokens, CPU)
    out_BHD = attention.attend(layer, rule.rows(q_BHD, k_BKD, v_BKD))
    for row, prompt in enumerate(rows.prompt_of_B.tolist()):
        read = cells(rows.prompt_table_UX[prompt], int(rows.num_prompt_keys_U[prompt]), block_tokens)
        read += cells(rows.own_table_BX[row], int(rows.num_own_keys_B[row]), block_tokens)
        assert rows.position_B[row] == len(read) - 1
        block, offset = torch.tensor(read).T
        k_TKD, v_TKD = layer.k_cache[block, :, offset], layer.v_cache[block, :, offset]
        assert torch.equal(k_TKD[-1], k_BKD[row]) and torch.equal(v_TKD[-1], v_BKD[row])
        expected_HD = one_query(q_BHD[row], k_TKD, v_TKD, rule)
        torch.testing.assert_close(out_BHD[row].double(), expected_HD, rtol=0, atol=2e-6)


@pytest.mark.parametrize("rule", RULES)
@given(seed=st.integers(0, 2**32 - 1), block_tokens=st.integers(1, 4))
@settings(max_examples=20, deadline=None)
def test_each_row_of_a_piece_reads_the_keys_up_to_its_own(rule: Rule, seed: int, block_tokens: int):
    rng = np.random.default_rng(seed)
    generator = torch.Generator().manual_seed(seed)
    layer = LayerCache(*(torch.randn(NUM_BLOCKS, K, block_tokens, width, generator=generator) for width in (D, DV)))
    numbers = iter(rng.permutation(NUM_BLOCKS).tolist())
    pieces = []
    for number in range(int(rng.integers(1, 5))):
        num_prompt, num_own = int(rng.integers(1, 8)), int(rng.choice([0, 0, 3, 5]))
        num_new = int(rng.integers(1, (num_own or num_prompt) + 1))
        prompt_blocks, own_blocks = (
            [next(numbers) for _ in range(-(-num_keys // block_tokens))] for num_keys in (num_prompt, num_own)
        )
        pieces.append(PrefillPiece(np.full(num_new, number), prompt_blocks, num_prompt, own_blocks, num_own))
    prefill = Prefill(pieces, block_tokens, CPU)
    R = prefill.token_ids_R.size
    q_RHD = torch.randn(R, H, D, generator=generator)
    k_RKD, v_RKD = (torch.randn(R, K, width, generator=generator) for width in (D, DV))
    out_RHD = prefill.attend(layer, rule.rows(q_RHD, k_RKD, v_RKD))
    for number, piece in enumerate(pieces):
        (rows,) = np.nonzero(prefill.token_ids_R == number)
        assert prefill.last_row_of(piece) == rows[-1]
        read = cells(np.array(piece.prompt_blocks), piece.num_prompt_keys, block_tokens)
        read += cells(np.array(piece.own_blocks), piece.num_own_keys, block_tokens)
        block, offset = torch.tensor(read).T
        k_TKD, v_TKD = layer.k_cache[block, :, offset], layer.v_cache[block, :, offset]
        assert torch.equal(k_TKD[-rows.size :], k_RKD[rows])
        assert prefill.positions_R[rows].tolist() == list(range(len(read) - rows.size, len(read)))
        for row, position in zip(rows.tolist(), prefill.positions_R[rows].tolist(), strict=True):
            expected_HD = one_query(q_RHD[row], k_TKD[: position + 1], v_TKD[: position + 1], rule)
            torch.testing.assert_close(out_RHD[row].double(), expected_HD, rtol=0, atol=2e-6)
