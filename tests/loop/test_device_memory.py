"""What a device's memory is taken to be, control groups included."""

from pathlib import Path

import pytest
import torch

from ratoon.loop.device_memory import DeviceMemory, _cgroup_limits

GIB = 1 << 30


def test_a_gpu_keeps_its_margin_whatever_others_take():
    free = DeviceMemory.of_total("cuda", 100 * GIB)
    assert free.usable_bytes == 100 * GIB - 8 * GIB - GIB
    shared = DeviceMemory.of_total("cuda", 100 * GIB, 50 * GIB)
    assert shared.usable_bytes == 50 * GIB - 8 * GIB
    assert DeviceMemory.of_total("cuda", GIB).usable_bytes == 0


def test_a_host_keeps_a_share_of_what_is_free():
    assert DeviceMemory.of_total("cpu", 100 * GIB, 10 * GIB).usable_bytes == 8 * GIB
    here = DeviceMemory.here(torch.device("cpu"))
    assert 0 < here.usable_bytes < here.total_bytes


def test_processes_of_a_host_share_its_memory_and_have_gpus_of_their_own():
    host = DeviceMemory.of_total("cpu", 100 * GIB, 10 * GIB).shared_by(4)
    assert (host.total_bytes, host.usable_bytes) == (25 * GIB, 2 * GIB)
    assert "4 processes share" in host.margin
    gpu = DeviceMemory.of_total("cuda", 100 * GIB)
    assert gpu.shared_by(4) == gpu


@pytest.mark.parametrize(
    ("line", "folder", "files"),
    [
        ("0::/job/task", "job/task", ("memory.max", "memory.current", "inactive_file")),
        ("0::/job/task", "job", ("memory.max", "memory.current", "inactive_file")),  # an outer group's limit holds too
        ("0::/", "", ("memory.max", "memory.current", "inactive_file")),
        ("4:memory:/job", "memory/job", ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")),
        ("4:memory:/job", "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")),
    ],
)
def test_limits_of_control_groups_are_found(tmp_path: Path, line: str, folder: str, files: tuple[str, str, str]):
    """What files were read into memory can be given back: it does not count as used."""
    own, group = tmp_path / "cgroup", tmp_path / "fs" / folder
    own.write_text(f"9:name=systemd:/elsewhere\n{line}\n")
    group.mkdir(parents=True)
    limit, used, reclaimable = files
    (group / limit).write_text("1000\n")
    (group / used).write_text("700\n")
    (group / "memory.stat").write_text(f"anon 400\n{reclaimable} 300\n")
    assert list(_cgroup_limits(tmp_path / "fs", own)) == [(1000, 400)]


def test_no_limit_is_none(tmp_path: Path):
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("700\n")
    assert list(_cgroup_limits(tmp_path, tmp_path / "absent")) == []
