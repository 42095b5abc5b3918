"""What joins the calls of several levels: one pass over the rows, on the device that holds them."""

# Shape letters: T rows, R rows that are touched, H heads, D head dim, E value head dim.

import torch
from torch import Tensor


def merge_level(out_THE: Tensor, lse_HT: Tensor, part_THE: Tensor, part_lse_HT: Tensor, reads_T: Tensor) -> None:
    """Adds a level's attention to what rows have so far, in place.

    out_THE: half, fp32 or fp64; weighed and added in lse's dtype, then rounded to its own.
    reads_T: [T] bool. Other rows keep their output, and their part is not looked at: it may hold anything.
    """
    if out_THE.is_cuda:
        from ratoon.attention.flash import merge_kernels  # needs triton

        merge_kernels.merge_level(out_THE, lse_HT, part_THE, part_lse_HT, reads_T)
        return
    rows_R = reads_T.nonzero()[:, 0]
    lse_HR, part_lse_HR = lse_HT[:, rows_R], part_lse_HT[:, rows_R]
    total_HR = torch.logaddexp(lse_HR, part_lse_HR)
    kept_RH1, added_RH1 = ((x - total_HR).exp().T[..., None] for x in (lse_HR, part_lse_HR))
    out_THE[rows_R] = (out_THE[rows_R] * kept_RH1 + part_THE[rows_R] * added_RH1).to(out_THE.dtype)
    lse_HT[:, rows_R] = total_HR


def add_level(total_THD: Tensor, part_THD: Tensor, is_added_T: Tensor) -> None:
    """total += part in the rows that are marked, in place, added in fp32 or wider. Other rows of the part: anything."""
    if total_THD.is_cuda:
        from ratoon.attention.flash import merge_kernels  # needs triton

        merge_kernels.add_level(total_THD, part_THD, is_added_T)
        return
    rows_R = is_added_T.nonzero()[:, 0]
    wide = torch.promote_types(total_THD.dtype, torch.float32)
    total_THD[rows_R] = (total_THD[rows_R].to(wide) + part_THD[rows_R]).to(total_THD.dtype)


def add_sinks(out_THE: Tensor, lse_HT: Tensor, sinks_H: Tensor) -> tuple[Tensor, Tensor]:
    """A sink is one more key of every row, whose value is zero. Returns the output, in its dtype, and log-sum-exp."""
    total_HT = torch.logaddexp(lse_HT, sinks_H.to(lse_HT.dtype)[:, None])
    kept_TH1 = (lse_HT - total_HT).exp().T[..., None]
    return (out_THE * kept_TH1).to(out_THE.dtype), total_HT
