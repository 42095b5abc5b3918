"""A rank that hangs or is gone is named by those that wait for it, in our words."""

import os
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tests.distributed.ranks import run_on_ranks

from ratoon.distributed import CollectiveError, DataParallel
from ratoon.distributed.lost_rank import describe_loss


def loss_of(wait: Callable[[], object]) -> str:
    with pytest.raises(CollectiveError) as error:
        wait()
    return str(error.value)


def wait_for_rank_zero(ranks: DataParallel, _: Path) -> list[str]:
    """It comes late to a sum, and in another group to a barrier."""
    impatient = replace(ranks, timeout_s=0.5, control_group=dist.new_group(timeout=timedelta(seconds=0.5)))
    ranks.barrier()
    if ranks.is_main:
        time.sleep(2.5)
        return []
    return [loss_of(lambda: impatient.all_reduce_sums({"a": 1.0})), loss_of(lambda: ranks.barrier(timeout_s=0.5))]


def hang_on_rank_two(ranks: DataParallel, _: Path) -> list[str]:
    ranks.barrier()
    if ranks.rank == 2:
        time.sleep(2.5)
        return []
    return [loss_of(lambda: ranks.barrier(timeout_s=0.5))]


def lose_rank_zero(ranks: DataParallel, folder: Path) -> list[str]:
    ranks.barrier()
    if ranks.is_main:
        torch.save([], folder / "rank0.pt")  # what it would have returned
        os._exit(0)
    return [loss_of(lambda: ranks.all_gather("states of the ranks", 1))]


def test_rank_zero_that_hangs_is_named_without_torchs_words(tmp_path: Path):
    for message in run_on_ranks(2, wait_for_rank_zero, tmp_path)[1]:
        assert message.startswith("rank 0 did not come within 0.5 s (trainer.rank_timeout_s): rank 1 of 2 waited")
        assert "raise trainer.rank_timeout_s. The same command goes on" in message
        assert "Please" not in message and ".cc" not in message and "pair" not in message


def test_of_three_ranks_rank_zero_names_the_one_that_hangs(tmp_path: Path):
    (first,), (second,), _ = run_on_ranks(3, hang_on_rank_two, tmp_path)
    assert first.startswith("rank 2 did not come within 0.5 s")
    assert second.startswith("rank 0, or one that it waits for, ")


def test_a_rank_that_is_gone_is_called_lost(tmp_path: Path):
    (message,) = run_on_ranks(2, lose_rank_zero, tmp_path)[1]
    assert message.startswith(
        "rank 0 was lost: rank 1 of 2 waited for it in an exchange (states of the ranks). It ended"
    )


def test_memory_that_ran_out_here_is_not_blamed_on_another_rank():
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore lines")
    said = describe_loss("rank 1", "a sum", error, waiter="rank 0 of 2", limit_s=5.0, waited_s=9.0)
    assert said.startswith("rank 0 of 2 ran out of memory in an exchange (a sum): CUDA out of memory. Tried")
    assert "rank 1" not in said and "more lines" not in said and "max_rows_per_microbatch" in said
