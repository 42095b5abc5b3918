"""The cases are what their names say, and their useful work is counted pair by pair."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.attention.oracle import dense_mask

from ratoon.bench.attention.cases import CASES, AttentionCase, Documents, Groups, Tree, choose_cases, uniform_twin
from ratoon.layout import PackedLayout
from ratoon.types.errors import UserError

TINY = [case for case in CASES.values() if not case.needs_gpu]
LARGE = [case for case in CASES.values() if case.needs_gpu]


@pytest.mark.parametrize("case", TINY, ids=lambda case: case.name)
def test_useful_flops_count_every_pair_of_the_dense_mask(case: AttentionCase):
    num_pairs = int(dense_mask(case.layout, case.window).sum())
    assert case.num_pairs == num_pairs
    assert case.forward_flops == 4 * case.H * case.D * num_pairs
    assert case.backward_flops == 10 * case.H * case.D * num_pairs


@pytest.mark.parametrize(
    ("name", "P", "R", "N", "H", "Hkv", "D"),
    [
        ("p8192-r1024-n16", 8192, 1024, 16, 32, 8, 128),
        ("p8192-r512-n32", 8192, 512, 32, 32, 8, 128),
        ("p2048-r4096-n16", 2048, 4096, 16, 32, 8, 128),
        ("p2048-r512-n8", 2048, 512, 8, 32, 8, 128),
        ("p8192-r512-n16-d256", 8192, 512, 16, 16, 8, 256),
        ("p8192-r512-n16-d512", 8192, 512, 16, 8, 4, 512),
        ("p32768-r2048-n28", 32768, 2048, 28, 32, 8, 128),
    ],
)
def test_named_shapes(name: str, P: int, R: int, N: int, H: int, Hkv: int, D: int):
    case = CASES[name]
    assert case.key == {"P": P, "R": R, "N": N, "groups": 1, "H": H, "Hkv": Hkv, "D": D, "window": None}
    assert case.layout.num_rows == P + N * R
    assert case.forward_flops == 4 * H * D * (P * (P + 1) / 2 + N * (R * P + R * (R + 1) / 2))
    assert case.backward_flops == 2.5 * case.forward_flops


def test_floors_by_hand():
    case = AttentionCase(name="x", forest=Groups(P=3, R=2, N=2), H=4, Hkv=2, D=16, peers=())
    # 6 pairs in the prompt, 2 * 3 + 3 in each response; 7 rows.
    assert case.forward_flops == 4 * 4 * 16 * (6 + 2 * 9)
    moved = 7 * (2 * 4 * 16 + 2 * 2 * 16) * 2 + 7 * 4 * 4  # q and out, k and v, log-sum-exp
    floors_ms = case.floors_ms(matmul_tflops=1e-6, copy_tb_per_s=1e-9, element_size=2)
    assert floors_ms["fwd"] == pytest.approx((case.forward_flops / 1e6 * 1e3, moved / 1e3 * 1e3))
    moved_back = 7 * (4 * 4 * 16 + 4 * 2 * 16) * 2 + 7 * 4 * 4
    assert floors_ms["bwd"] == pytest.approx((case.backward_flops / 1e6 * 1e3, moved_back / 1e3 * 1e3))


def segment_lengths(layout: PackedLayout) -> list[int]:
    return np.diff(layout.segment_offsets).tolist()


def test_ragged_groups_are_drawn_once_and_for_all():
    case = CASES["ragged-16-groups"]
    lengths = np.array(segment_lengths(case.layout)).reshape(16, 9)
    assert (lengths[:, 0] == 1024).all()
    assert lengths[:, 1:].min() >= 64 and lengths[:, 1:].max() <= 2048
    assert len(set(lengths[:, 1:].ravel().tolist())) > 100
    assert segment_lengths(Groups(P=1024, R=(64, 2048), N=8, groups=16).layout()) == lengths.ravel().tolist()
    assert case.key["R"] == [64, 2048]


def test_the_uniform_twin_is_the_same_work():
    ragged, twin = CASES["ragged-16-groups"], CASES["ragged-16-groups-uniform-twin"]
    assert twin.layout.num_rows == pytest.approx(ragged.layout.num_rows, rel=1e-3)
    assert twin.forward_flops == pytest.approx(ragged.forward_flops, rel=1e-3)
    assert twin.key["groups"] == 1 and isinstance(twin.key["R"], int)


@given(st.integers(1, 40), st.integers(1, 6), st.integers(1, 4), st.integers(1, 30), st.integers(0, 40))
def test_no_other_uniform_group_is_nearer(P: int, N: int, groups: int, least: int, more: int):
    ragged = Groups(P=P, R=(least, least + more), N=N, groups=groups)

    def work(forest: Groups) -> np.ndarray:
        layout = forest.layout()
        return np.array([layout.num_rows, int(dense_mask(layout).sum())])

    twin = uniform_twin(ragged)
    wanted = work(ragged)
    gap = np.abs(work(twin) / wanted - 1).max()
    for other_N in (twin.N - 1, twin.N + 1):
        if 1 <= other_N <= wanted[0] - P:
            R = max(1, round((wanted[0] - P) / other_N))
            assert np.abs(work(Groups(P=P, R=R, N=other_N)) / wanted - 1).max() >= gap


def test_the_tree_is_four_deep():
    layout = CASES["tree-depth-4"].layout
    depths: list[int] = []
    for parent in layout.segment_parent.tolist():
        depths.append(0 if parent < 0 else depths[parent] + 1)
    assert max(depths) == 4
    assert [depths.count(depth) for depth in range(5)] == [1, 2, 4, 8, 32]
    assert {(d, n) for d, n in zip(depths, segment_lengths(layout), strict=True)} == {
        (0, 4096), (1, 2048), (2, 1024), (3, 1024), (4, 512),
    }  # fmt: skip


def test_documents_share_nothing():
    layout = CASES["documents"].layout
    assert layout.dedup_ratio == 1.0
    assert (layout.segment_parent == -1).all() and layout.num_segments == 16


def test_local_and_global_layers_of_one_model_stand_side_by_side():
    local, wide = CASES["p8192-r512-n16-d256-window1024"], CASES["p8192-r512-n16-d512"]
    assert (local.D, local.window, wide.D, wide.window) == (256, 1024, 512, None)
    assert {**local.key, "D": 0, "window": 0} == {**wide.key, "D": 0, "window": 0}
    keys_T = np.minimum(local.layout.positions_T.astype(int) + 1, 1024)
    assert local.num_pairs == keys_T.sum() < wide.num_pairs / 5


@pytest.mark.parametrize("case", CASES.values(), ids=lambda case: case.name)
def test_keys_of_a_row(case: AttentionCase):
    assert list(case.key) == ["P", "R", "N", "groups", "H", "Hkv", "D", "window"]


def test_tiny_cases_have_every_kind_of_forest():
    assert {type(case.forest) for case in TINY} == {Groups, Tree, Documents}
    assert any(case.window for case in TINY)
    assert all(case.layout.num_rows < 300 for case in TINY)


def test_choosing_cases():
    assert choose_cases(None, has_gpu=True) == LARGE
    assert choose_cases(None, has_gpu=False) == TINY
    assert choose_cases(["tiny-tree", "p2048-r512-n8"], has_gpu=True) == [CASES["tiny-tree"], CASES["p2048-r512-n8"]]
    with pytest.raises(UserError, match="no such attention case: nope; there are p8192-r1024-n16, "):
        choose_cases(["tiny-tree", "nope"], has_gpu=True)
    with pytest.raises(UserError, match="no CUDA device here: p2048-r512-n8; a CPU can run tiny-group"):
        choose_cases(["tiny-tree", "p2048-r512-n8"], has_gpu=False)
