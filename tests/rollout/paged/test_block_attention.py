"""Attention over blocks against one softmax a query in float64."""

# Shape letters: B rows that decode, U prompts, X blocks of one table row, H query heads, K key heads, D head dim.

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ratoon.rollout.engines.paged.block_attention import (
    DecodeTables,
    PieceReads,
    ScoreRule,
    decode_attention,
    prefill_attention,
)
from ratoon.rollout.engines.paged.runner import DecodeRows

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


def one_query(q_HD: Tensor, k_TKD: Tensor, v_TKD: Tensor, rule: ScoreRule) -> Tensor:
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


RULES = [
    ScoreRule(0.4, None, None, None),
    ScoreRule(0.3, 3, None, None),
    ScoreRule(0.4, None, 1.5, None),
    ScoreRule(0.4, 4, 1.5, torch.linspace(-1, 2, H)),
]


@pytest.mark.parametrize("rule", RULES)
@given(seed=st.integers(0, 2**32 - 1), block_tokens=st.integers(1, 4))
@settings(max_examples=20, deadline=None)
def test_decode_is_one_softmax_over_prompt_and_own_keys(rule: ScoreRule, seed: int, block_tokens: int):
    rng = np.random.default_rng(seed)
    rows = make_rows(rng, block_tokens)
    generator = torch.Generator().manual_seed(seed)
    q_BHD = torch.randn(rows.token_B.size, H, D, generator=generator)
    k_cache = torch.randn(NUM_BLOCKS, K, block_tokens, D, generator=generator)
    v_cache = torch.randn(NUM_BLOCKS, K, block_tokens, DV, generator=generator)
    out_BHD = decode_attention(q_BHD, k_cache, v_cache, DecodeTables.of(rows, CPU), rule)
    for row, prompt in enumerate(rows.prompt_of_B.tolist()):
        read = cells(rows.prompt_table_UX[prompt], int(rows.num_prompt_keys_U[prompt]), block_tokens)
        read += cells(rows.own_table_BX[row], int(rows.num_own_keys_B[row]), block_tokens)
        assert rows.position_B[row] == len(read) - 1
        block, offset = torch.tensor(read).T
        expected_HD = one_query(q_BHD[row], k_cache[block, :, offset], v_cache[block, :, offset], rule)
        torch.testing.assert_close(out_BHD[row].double(), expected_HD, rtol=0, atol=2e-6)


@pytest.mark.parametrize("rule", RULES)
@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=20, deadline=None)
def test_each_row_of_a_piece_reads_the_keys_up_to_its_own(rule: ScoreRule, seed: int):
    rng = np.random.default_rng(seed)
    generator = torch.Generator().manual_seed(seed)
    k_cache, v_cache = (torch.randn(NUM_BLOCKS, K, 3, width, generator=generator) for width in (D, DV))
    pieces: list[PieceReads] = []
    for _ in range(int(rng.integers(1, 4))):
        num_keys = int(rng.integers(1, 12))
        first = pieces[-1].end_row if pieces else 0
        end = first + int(rng.integers(1, num_keys + 1))
        cell_T = torch.from_numpy(rng.permutation(NUM_BLOCKS * 3)[:num_keys])
        pieces.append(PieceReads(first, end, cell_T // 3, cell_T % 3))
    q_RHD = torch.randn(pieces[-1].end_row, H, D, generator=generator)
    out_RHD = prefill_attention(q_RHD, k_cache, v_cache, pieces, rule)
    for piece in pieces:
        k_TKD, v_TKD = (cache[piece.block_T, :, piece.offset_T] for cache in (k_cache, v_cache))
        num_past = len(piece.block_T) - (piece.end_row - piece.first_row)
        for row in range(piece.first_row, piece.end_row):
            end = num_past + row - piece.first_row + 1
            expected_HD = one_query(q_RHD[row], k_TKD[:end], v_TKD[:end], rule)
            torch.testing.assert_close(out_RHD[row].double(), expected_HD, rtol=0, atol=2e-6)
