"""Host arrays arrive as they are, and as copies."""

import numpy as np
import pytest
import torch

from ratoon.attention.transfer import to_device

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "values",
    [np.arange(7, dtype=np.int32), np.zeros(0), np.array([[True, False]]), np.arange(40_000), np.array(3.5)],
)
def test_values_shapes_and_dtypes(values: np.ndarray, device: str):
    got = to_device(values, torch.device(device))
    assert got.device.type == device and got.shape == values.shape
    assert torch.equal(got.cpu(), torch.tensor(values))
    assert to_device(values, torch.device(device), torch.float64).dtype == torch.float64


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("values", [torch.arange(5.0), torch.arange(5).bfloat16(), torch.arange(6).view(2, 3).T])
def test_tensors_of_any_dtype(values: torch.Tensor, dtype: torch.dtype | None, device: str):
    got = to_device(values, torch.device(device), dtype)
    assert got.dtype == (dtype or values.dtype) and torch.equal(got.cpu().double(), values.double())


@pytest.mark.parametrize("device", DEVICES)
def test_what_is_written_to_the_source_later_does_not_arrive(device: str):
    values, tensor = np.arange(5), torch.arange(5)
    copies = [to_device(source, torch.device(device)) for source in (values, tensor)]
    values += 1
    tensor += 1
    assert all(copy.tolist() == [0, 1, 2, 3, 4] for copy in copies)


def test_arrays_that_may_not_be_written_are_copied():
    values = np.arange(3)
    values.flags.writeable = False
    assert to_device(values, torch.device("cpu")).add_(1).tolist() == [1, 2, 3]
    assert values.tolist() == [0, 1, 2]


@pytest.mark.gpu
def test_the_host_does_not_wait():
    values = np.arange(1_000_000)
    to_device(values, torch.device("cuda"))
    torch.cuda.set_sync_debug_mode("error")
    try:
        to_device(values, torch.device("cuda"), torch.int32)
    finally:
        torch.cuda.set_sync_debug_mode("default")
