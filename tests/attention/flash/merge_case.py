"""Two parts to join, of odd sizes, with poison where a kernel writes nothing; as a program: how far kernels are off."""

# Shape letters: T rows, H heads, E value head dim.

from dataclasses import dataclass

import torch
from torch import Tensor

EXPECTED_ERROR = 2e-3
"""One rounding of fp16; the interpreter's bf16 is tested on a GPU."""


@dataclass
class MergeCase:
    out_THE: Tensor
    lse_HT: Tensor
    part_THE: Tensor
    part_lse_HT: Tensor
    marked_T: Tensor


def make_merge_case(dtype: torch.dtype, device: str = "cpu") -> MergeCase:
    """100 rows: a block of 32 without a mark, and a last one that is short."""
    generator = torch.Generator().manual_seed(1)
    T, H, E = 100, 3, 20
    marked_T = torch.rand(T, generator=generator) < 0.5
    marked_T[32:64] = False
    part_THE = torch.randn(T, H, 2 * E, generator=generator)[..., :E]
    part_lse_HT = 4 * torch.randn(H, T, generator=generator)
    part_THE[~marked_T], part_lse_HT[:, ~marked_T] = torch.nan, torch.inf
    return MergeCase(
        out_THE=torch.randn(T, H, E, generator=generator).to(device, dtype),
        lse_HT=(4 * torch.randn(H, T, generator=generator)).to(device),
        part_THE=part_THE.to(device, dtype),
        part_lse_HT=part_lse_HT.to(device),
        marked_T=marked_T.to(device),
    )


def errors_of_kernels(dtype: torch.dtype, device: str) -> list[float]:
    """Largest differences of output, log-sum-exp and sum, from the eager twins on the CPU."""
    from ratoon.attention.flash import merge, merge_kernels

    case, twin = make_merge_case(dtype, device), make_merge_case(dtype)
    total_THE, twin_total_THE = case.out_THE.clone(), twin.out_THE.clone()
    merge_kernels.merge_level(case.out_THE, case.lse_HT, case.part_THE, case.part_lse_HT, case.marked_T)
    merge.merge_level(twin.out_THE, twin.lse_HT, twin.part_THE, twin.part_lse_HT, twin.marked_T)
    merge_kernels.add_level(total_THE, case.part_THE, case.marked_T)
    merge.add_level(twin_total_THE, twin.part_THE, twin.marked_T)
    pairs = (
        (case.out_THE, twin.out_THE),
        (case.lse_HT, twin.lse_HT),
        (total_THE, twin_total_THE),
    )
    return [(x.cpu().double() - y.double()).abs().max().item() for x, y in pairs]


if __name__ == "__main__":
    print(*errors_of_kernels(torch.float16, "cpu"))
    print(*errors_of_kernels(torch.float32, "cpu"))
