"""Two gloo ranks against arithmetic done in one process."""

import multiprocessing
import socket
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ratoon.distributed import CollectiveError, DataParallel, from_environment, single_process

WORLD_SIZE = 2
SHAPES = [(3, 5), (7,), (1,), (2, 3, 4), (64,)]

Check = Callable[[DataParallel], Any]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _rank_main(environment: dict[str, str], checks: list[Check], result_file: Path) -> None:
    torch.set_num_threads(1)
    try:
        data_parallel = replace(from_environment("cpu", timeout_s=30, environment=environment), bucket_bytes=64)
        torch.save([check(data_parallel) for check in checks], result_file)
        data_parallel.close()
    except BaseException:
        torch.save(traceback.format_exc(), result_file)


def run_on_two_ranks(checks: list[Check], folder: Path) -> list[list[Any]]:
    """What each check returned, by rank. A rank's exception fails the test with that rank's traceback."""
    context = multiprocessing.get_context("spawn")
    launch = {"WORLD_SIZE": str(WORLD_SIZE), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
    files = [folder / f"rank{rank}.pt" for rank in range(WORLD_SIZE)]
    ranks = [
        context.Process(target=_rank_main, args=(launch | {"RANK": str(rank)}, checks, file))
        for rank, file in enumerate(files)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(timeout=90)
        process.kill()
    results = [torch.load(file, weights_only=True) for file in files]
    for rank, result in enumerate(results):
        assert not isinstance(result, str), f"rank {rank}:\n{result}"
    return results


def make_parameters(dtype: torch.dtype) -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in SHAPES]


def gradient(rank: int, index: int, dtype: torch.dtype) -> Tensor | None:
    """Rank 1 is idle but for parameter 1; nobody has a gradient of parameter 2."""
    if index == 2 or (rank == 1 and index != 1):
        return None
    generator = torch.Generator().manual_seed(10 * rank + index)
    return torch.randn(SHAPES[index], generator=generator, dtype=torch.float64).to(dtype)


def reduce_gradients(data_parallel: DataParallel, dtype: torch.dtype = torch.float64) -> list[Tensor | None]:
    parameters = make_parameters(dtype)
    for index, parameter in enumerate(parameters):
        parameter.grad = gradient(data_parallel.rank, index, dtype)
    data_parallel.all_reduce_gradients(parameters)
    return [parameter.grad for parameter in parameters]


def reduce_bf16_gradients(data_parallel: DataParallel) -> list[Tensor | None]:
    return reduce_gradients(data_parallel, torch.bfloat16)


def reduce_transposed_gradient(data_parallel: DataParallel) -> Tensor | None:
    parameter = nn.Parameter(torch.zeros(5, 3).t())
    parameter.grad = torch.arange(15.0).view(5, 3).t() * (data_parallel.rank + 1)
    data_parallel.all_reduce_gradients([parameter])
    return parameter.grad


def reduce_frozen(data_parallel: DataParallel) -> Tensor | None:
    frozen = nn.Parameter(torch.zeros(3), requires_grad=False)
    data_parallel.all_reduce_gradients([frozen])
    return frozen.grad


def sum_values(data_parallel: DataParallel) -> dict[str, float]:
    # Another order of names on each rank, and a sum that float32 would round.
    pairs = [("tokens", 2.0**24 + data_parallel.rank), ("loss", 0.1)]
    return data_parallel.all_reduce_sums(dict(pairs if data_parallel.rank == 0 else reversed(pairs)))


def largest_values(data_parallel: DataParallel) -> dict[str, float]:
    return data_parallel.all_reduce_maxima({"gap": -3.0 + data_parallel.rank, "norm": 5.0 - data_parallel.rank})


def broadcast(data_parallel: DataParallel) -> list[Tensor]:
    torch.manual_seed(data_parallel.rank)
    tensors = [
        torch.randn(9, 5),
        torch.randn(5, 3).t(),
        torch.randn(11).bfloat16(),
        torch.arange(3) + data_parallel.rank,
        torch.tensor(float("nan") if data_parallel.rank == 0 else 1.0),
        torch.zeros(0),
        torch.tensor([True, data_parallel.rank == 0]),
    ]
    data_parallel.broadcast_parameters(tensors)
    return tensors


def different_names(data_parallel: DataParallel) -> str:
    with pytest.raises(CollectiveError) as error:
        data_parallel.all_reduce_sums({f"only_on_{data_parallel.rank}": 1.0})
    return str(error.value)


def different_models(data_parallel: DataParallel) -> str:
    with pytest.raises(CollectiveError) as error:
        data_parallel.broadcast_parameters([torch.zeros(3 + data_parallel.rank)])
    return str(error.value)


def count_collectives(data_parallel: DataParallel) -> int:
    """How many collectives this rank starts."""
    started = 0
    original = dist.all_reduce

    def counting(*arguments: Any, **keywords: Any) -> Any:
        nonlocal started
        started += 1
        return original(*arguments, **keywords)

    dist.all_reduce = counting
    try:
        reduce_gradients(data_parallel)
    finally:
        dist.all_reduce = original
    return started


def late_barrier(data_parallel: DataParallel) -> str:
    """Rank 1 comes after rank 0 has given up. Last: a group is of no use after a failure."""
    data_parallel.barrier()
    if data_parallel.rank == 1:
        time.sleep(1.5)
        return "late"
    with pytest.raises(CollectiveError) as error:
        data_parallel.barrier(timeout_s=0.5)
    return str(error.value)


CHECKS: list[Check] = [
    reduce_gradients,
    reduce_bf16_gradients,
    reduce_transposed_gradient,
    reduce_frozen,
    sum_values,
    largest_values,
    broadcast,
    count_collectives,
    different_names,
    different_models,
    late_barrier,
]


@pytest.fixture(scope="module")
def on_two_ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[Check, list[Any]]:
    """Results of every check, [rank 0's, rank 1's]: processes take seconds to start, so all share two."""
    by_rank = run_on_two_ranks(CHECKS, tmp_path_factory.mktemp("store"))
    return {check: [results[index] for results in by_rank] for index, check in enumerate(CHECKS)}


def test_gradients_are_summed_and_missing_ones_are_zeros(on_two_ranks: dict[Check, list[Any]]):
    """verl#5591: ranks with different work must not disagree on the collectives they start."""
    for reduced in on_two_ranks[reduce_gradients]:
        for index, total in enumerate(reduced):
            given = [grad for rank in (0, 1) if (grad := gradient(rank, index, torch.float64)) is not None]
            if not given:
                assert total is None, "a parameter that nobody used stays as with one rank"
            else:
                assert torch.equal(total, torch.stack(given).sum(0))


def test_ranks_hold_the_same_bits_and_16_bit_sums_round_once(on_two_ranks: dict[Check, list[Any]]):
    first, second = on_two_ranks[reduce_bf16_gradients]
    for index in (0, 1, 3, 4):
        assert torch.equal(first[index], second[index])
    given = [grad for rank in (0, 1) if (grad := gradient(rank, 1, torch.bfloat16)) is not None]
    exact = torch.stack(given).double().sum(0)
    assert first[1].dtype == torch.bfloat16
    assert torch.equal(first[1], exact.bfloat16())


def test_layout_of_a_gradient_does_not_matter(on_two_ranks: dict[Check, list[Any]]):
    for total in on_two_ranks[reduce_transposed_gradient]:
        assert torch.equal(total, 3 * torch.arange(15.0).view(5, 3).t())


def test_frozen_parameters_take_no_part(on_two_ranks: dict[Check, list[Any]]):
    assert on_two_ranks[reduce_frozen] == [None, None]


def test_values_are_summed_in_float64_by_name(on_two_ranks: dict[Check, list[Any]]):
    assert on_two_ranks[sum_values] == [{"loss": 0.2, "tokens": 2.0**25 + 1}] * 2


def test_largest_values(on_two_ranks: dict[Check, list[Any]]):
    assert on_two_ranks[largest_values] == [{"gap": -2.0, "norm": 5.0}] * 2


def test_broadcast_copies_bits(on_two_ranks: dict[Check, list[Any]]):
    first, second = on_two_ranks[broadcast]
    torch.manual_seed(0)
    assert torch.equal(second[0], torch.randn(9, 5)) and torch.equal(second[1], torch.randn(5, 3).t())
    for mine, theirs in zip(first, second, strict=True):
        assert mine.dtype == theirs.dtype and torch.equal(mine.nan_to_num(-7.0), theirs.nan_to_num(-7.0))
    assert second[4].isnan() and second[3].tolist() == [0, 1, 2]


def test_idle_ranks_start_the_same_collectives_in_bounded_buckets(on_two_ranks: dict[Check, list[Any]]):
    first, second = on_two_ranks[count_collectives]
    # One for which gradients exist; then 64-byte buckets of float64. Parameter 2 has no gradient.
    assert first == second == 1 + -(-(15 + 7 + 24 + 64) // 8)


def test_ranks_that_disagree_are_named(on_two_ranks: dict[Check, list[Any]]):
    for message in on_two_ranks[different_names]:
        assert "names in a sum differ between ranks: ranks [1]" in message
    for message in on_two_ranks[different_models]:
        assert "shapes and dtypes of parameters differ" in message
    assert "(4,)" in on_two_ranks[different_models][1]


def test_a_rank_that_does_not_come_is_named(on_two_ranks: dict[Check, list[Any]]):
    """prime-rl#1713: a hang must end, and say which wait it was."""
    message = on_two_ranks[late_barrier][0]
    assert message == (
        "rank 1 did not come within 0.5 s (trainer.rank_timeout_s): rank 0 of 2 waited for it in an exchange "
        "(barrier). It hangs, or works for longer than that: look at what it does, or raise trainer.rank_timeout_s. "
        "The same command goes on from the last checkpoint"
    )


def test_one_rank_is_a_no_op():
    data_parallel = single_process()
    parameter = nn.Parameter(torch.ones(3))
    data_parallel.all_reduce_gradients([parameter])
    assert parameter.grad is None
    parameter.grad = torch.full((3,), 2.0)
    data_parallel.all_reduce_gradients([parameter])
    data_parallel.broadcast_parameters([parameter])
    data_parallel.barrier()
    assert parameter.grad.tolist() == [2, 2, 2] and parameter.tolist() == [1, 1, 1]
    assert data_parallel.all_reduce_sums({"b": 1, "a": 2.5}) == {"a": 2.5, "b": 1.0}
    assert data_parallel.all_reduce_maxima({}) == {}
    assert data_parallel.is_main and not dist.is_initialized()
    data_parallel.close()


@pytest.mark.parametrize(("rank", "world_size"), [(2, 2), (-1, 1), (0, 0)])
def test_an_impossible_place_is_refused(rank: int, world_size: int):
    with pytest.raises(ValueError, match="world_size"):
        DataParallel(rank=rank, world_size=world_size)
