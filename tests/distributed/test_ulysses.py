"""Exchanges between gloo ranks against slices taken in one process."""

# Shape letters: T rows, B rows of one rank, U ranks, H heads, h heads of one rank, D head dim, E value head dim.

import copy
import time
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.distributed.ranks import run_on_ranks
from tests.distributed.test_sharded import Case, build, build_sharded, train
from torch import Tensor

from ratoon.distributed import CollectiveError, DataParallel, SequenceGroup, ranks_mesh, sequence_group, shard_mesh
from ratoon.distributed.ulysses import (
    HeadShares,
    exchange_rows,
    gather_heads,
    gather_shares,
    own_heads,
    scatter_heads,
    share_of,
)
from ratoon.models import set_sequence_parallel
from ratoon.types import UserError

D, E = 5, 3
HEADS = {2: [(2, 1), (6, 2), (4, 4), (6, 3), (8, 2)], 3: [(3, 1), (6, 2), (12, 4), (9, 9), (6, 3)]}
"""[ranks] query heads, key and value heads: split, sent to several ranks, and cut where no rank has a whole group."""


def whole(name: str, *shape: int) -> Tensor:
    """The same numbers on every rank."""
    generator = torch.Generator().manual_seed(len(name) + 10 * sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def attend(q_THD: Tensor, k_THD: Tensor, v_THE: Tensor) -> Tensor:
    """[T, H, E] of any function that treats query heads alike, each with its own kv head."""
    group = q_THD.shape[1] // k_THD.shape[1]
    k_THD, v_THE = (x.repeat_interleave(group, dim=1) for x in (k_THD, v_THE))
    return torch.einsum("thd,shd,she->the", q_THD, k_THD.cos(), v_THE)


def heads_there_and_back(group: SequenceGroup) -> list[list[Tensor]]:
    """For each pair of head counts: the largest errors of outputs and of the gradients of q, k and v."""
    B = 4
    errors: list[list[Tensor]] = []
    for num_heads, num_kv_heads in HEADS[group.size]:
        shapes = {"q": (num_heads, D), "keys": (num_kv_heads, D), "values": (num_kv_heads, E)}
        given = [whole(name, B * group.size, *shape).requires_grad_() for name, shape in shapes.items()]
        expected = attend(*given)
        cotangent = whole("cotangent", *expected.shape)
        (expected * cotangent).sum().backward()
        rows = slice(group.rank * B, (group.rank + 1) * B)
        # Head-major in memory, as models have them.
        own = [x.detach()[rows].transpose(0, 1).contiguous().requires_grad_() for x in given]
        q_BHD, k_BHD, v_BHE = (x.transpose(0, 1) for x in own)
        found = gather_heads(attend(*scatter_heads(q_BHD, k_BHD, v_BHE, group)), group)
        (found * cotangent[rows]).sum().backward()
        errors.append(
            [
                (found - expected[rows]).abs().max().detach(),
                *(
                    (cast(Tensor, mine.grad).transpose(0, 1) - cast(Tensor, all_.grad)[rows]).abs().max()
                    for mine, all_ in zip(own, given, strict=True)
                ),
            ]
        )
    return errors


def copies_are_summed_in_float32(group: SequenceGroup) -> float:
    """The one kv head's gradient where rank 0's is 1 and that of each other 2**-8."""
    q, k, v = (torch.zeros(1, heads, 2, dtype=torch.bfloat16, requires_grad=True) for heads in (6, 1, 1))
    _, k_ThD, _ = scatter_heads(q, k, v, group)
    (k_ThD * (1.0 if group.rank == 0 else 2.0**-8)).sum().backward()
    assert k.grad is not None and k.grad.dtype == torch.bfloat16
    return k.grad[0, 0, 0].item()


def rows_and_shares(group: SequenceGroup) -> list[float]:
    """Rank r sends r + u rows of its own number to rank u; then each has a share of 2 or 0 or 1 numbers of `total`."""
    send = [group.rank + rank for rank in range(group.size)]
    receive = [rank + group.rank for rank in range(group.size)]
    rows = torch.full((sum(send), 2), float(group.rank), requires_grad=True)
    received = exchange_rows(rows, send, receive, group)
    assert received[:, 0].tolist() == [float(rank) for rank in range(group.size) for _ in range(receive[rank])]
    (received * (group.rank + 1)).sum().backward()
    assert rows.grad is not None
    assert rows.grad[:, 1].tolist() == [float(rank + 1) for rank in range(group.size) for _ in range(send[rank])]
    for num_total in (0, 1, group.size, group.size + 2, 7):
        part = share_of(num_total, group)
        first, second = torch.arange(num_total).double(), torch.arange(num_total).double().square()
        mine = first[part].clone().requires_grad_()
        unused = second[part].clone().requires_grad_()
        found = gather_shares((mine, unused), num_total, group)
        assert torch.equal(found[0], first) and torch.equal(found[1], second)
        (found[0] * first.cos()).sum().backward()
        assert mine.grad is not None and torch.equal(mine.grad, first.cos()[part]) and unused.grad is None
    return received[:, 0].tolist()


def places(ranks: DataParallel) -> list[Any]:
    """The mesh of one group and of as many as there are ranks, and a degree that does not divide."""
    alone = sequence_group(ranks_mesh("cpu", 1))
    with pytest.raises(UserError) as error:
        ranks_mesh("cpu", ranks.world_size + 1)
    facts = [alone.rank, alone.size, alone.data_rank, alone.num_data_ranks, alone.is_first, alone.process_group is None]
    return [*facts, str(error.value)]


def exchange_on_ranks(ranks: DataParallel, _: Path) -> dict[str, Any]:
    group = sequence_group(ranks_mesh("cpu", ranks.world_size), timeout_s=30)
    found: dict[str, Any] = {fact.__name__: fact(group) for fact in (heads_there_and_back, rows_and_shares)}
    found["summed"] = copies_are_summed_in_float32(group)
    found["places"] = places(ranks)
    found["own"] = own_heads(torch.arange(6), group).tolist()
    found["is_first"] = group.is_first
    found["copied"] = copy.deepcopy(group) is group
    if ranks.world_size == 2:
        found["sharded"] = train_in_groups(group)
        found["late"] = missing_rank(ranks)
    return found


SHARDED = [Case(), Case(recompute="full", tied=False), Case(adapted=True)]


def train_in_groups(group: SequenceGroup) -> list[dict[str, Any]]:
    """Gradients, norms and weights of models that are sharded over the ranks of all groups."""
    place = {"rank": group.data_rank, "world_size": group.num_data_ranks}
    return [train(set_sequence_parallel(build_sharded(case), group), case, **place) for case in SHARDED]


def missing_rank(ranks: DataParallel) -> str:
    """Rank 1 does not come. Last: a group is of no use after a failure."""
    group = sequence_group(ranks_mesh("cpu", 2), timeout_s=0.5)
    if ranks.rank == 1:
        time.sleep(1.5)
        return "late"
    with pytest.raises(CollectiveError) as error:
        gather_heads(torch.zeros(2, 1, 1), group)
    return str(error.value)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[str, Any]]]:
    return {size: run_on_ranks(size, exchange_on_ranks, tmp_path_factory.mktemp(f"{size}")) for size in HEADS}


@pytest.mark.parametrize("degree", HEADS)
def test_heads_go_and_come_back(found: dict[int, list[dict[str, Any]]], degree: int):
    """Outputs and gradients, also where key and value heads are fewer than ranks or divide unevenly."""
    for of_rank in found[degree]:
        for heads, errors in zip(HEADS[degree], of_rank["heads_there_and_back"], strict=True):
            assert max(errors) < 1e-12, heads


@pytest.mark.parametrize("degree", HEADS)
def test_rows_and_shares_arrive_in_order(found: dict[int, list[dict[str, Any]]], degree: int):
    for rank, of_rank in enumerate(found[degree]):
        assert of_rank["rows_and_shares"] == [float(source) for source in range(degree) for _ in range(source + rank)]
        assert of_rank["own"] == list(range(6))[rank * 6 // degree : (rank + 1) * 6 // degree]


def test_a_head_on_several_ranks_gets_one_rounding(found: dict[int, list[dict[str, Any]]]):
    """1 + 2 * 2**-8 is 1.0078125 in bfloat16; 1 + 2**-8 rounds to 1, twice."""
    assert [of_rank["summed"] for of_rank in found[3]] == [1.0078125] * 3


def test_places(found: dict[int, list[dict[str, Any]]]):
    for degree in HEADS:
        for rank, of_rank in enumerate(found[degree]):
            *alone, message = of_rank["places"]
            assert alone == [0, 1, rank, degree, True, True]
            assert of_rank["is_first"] == (rank == 0) and of_rank["copied"]
            assert f"does not divide {degree} ranks" in message and f"can be 1, {degree}" in message


def check_training(found: list[list[dict[str, Any]]]) -> None:
    for index, case in enumerate(SHARDED):
        expected = train(build(case), case)
        for by_case in found:
            assert by_case[index]["grads"].keys() == expected["grads"].keys()
            for part in ("grads", "weights"):
                for name, value in expected[part].items():
                    torch.testing.assert_close(by_case[index][part][name], value, rtol=1e-9, atol=1e-9, msg=name)


def test_one_group_that_is_sharded_trains_as_one_process_does(found: dict[int, list[dict[str, Any]]]):
    check_training([of_rank["sharded"] for of_rank in found[2]])


def test_a_rank_that_does_not_come_is_named_with_the_exchange(found: dict[int, list[dict[str, Any]]]):
    message = found[2][0]["late"]
    assert message.startswith(
        "rank 1 did not come in time (trainer.rank_timeout_s): rank 0 of 2 that hold microbatches"
    )
    assert "heads of attention's output" in message


def train_on_a_mesh(_: DataParallel, __: Path) -> list[dict[str, Any]]:
    mesh = ranks_mesh("cpu", 2)
    assert shard_mesh("cpu").mesh.tolist() == mesh.mesh.flatten().tolist(), "weights are cut over both axes"
    return train_in_groups(sequence_group(mesh))


@pytest.mark.full
def test_two_groups_of_two_ranks_train_as_one_process_does(tmp_path: Path):
    """A mesh of both: data over one axis, sequences over the other, weights over all four ranks."""
    check_training(run_on_ranks(4, train_on_a_mesh, tmp_path))


def compiled_in_a_group(_: DataParallel, __: Path) -> list[dict[str, Any]]:
    group = sequence_group(ranks_mesh("cpu", 2))
    results: list[dict[str, Any]] = []
    for recompute in ("none", "full"):
        case = Case(dtype=torch.float32, compiled=True, recompute=recompute)
        results.append(train(set_sequence_parallel(build_sharded(case), group), case))
    return results


@pytest.mark.full
def test_compiled_layers_in_a_group_train_alike(tmp_path: Path):
    plain = Case(dtype=torch.float32)
    expected = train(build(plain), plain)
    for results in run_on_ranks(2, compiled_in_a_group, tmp_path):
        for got in results:
            for name, value in expected["grads"].items():
                torch.testing.assert_close(got["grads"][name], value, rtol=1e-4, atol=1e-6, msg=name)


@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 6), st.data())
def test_each_query_head_meets_its_own_kv_head(own: int, degree: int, kv: int, data: st.DataObject):
    """By counting, for every degree that divides the query heads and every number of kv heads that does."""
    num_heads = own * degree * kv
    num_kv_heads = data.draw(st.sampled_from([n for n in range(1, num_heads + 1) if num_heads % n == 0]))
    shares = HeadShares(num_heads, num_kv_heads, degree)
    per_kv = shares.own_heads // shares.own_kv_heads
    assert shares.own_heads % shares.own_kv_heads == 0 and shares.own_heads * degree == num_heads
    assert shares.own_kv_heads * degree == num_kv_heads * shares.kv_copies, "what is sent is what is received"
    for rank in range(degree):
        for head in range(shares.own_heads):
            received = rank * shares.own_kv_heads + head // per_kv
            wanted = (rank * shares.own_heads + head) // (num_heads // num_kv_heads)
            assert received // shares.kv_copies == wanted
    if num_kv_heads % degree == 0:
        assert shares.kv_copies == 1, "nothing is sent twice without need"
    if degree % num_kv_heads == 0:
        assert shares.own_kv_heads == 1
