"""Logits of one tile of [M, V]: the matrix product, its dtypes, and where the targets lie in it."""

# Shape letters: M scored tokens, C channels, V vocabulary; m, v: one tile of M and of V.

from dataclasses import dataclass
from importlib.util import find_spec

import torch
from torch import Tensor

from ratoon.ops.logprob.kept_sets import KeptTiles
from ratoon.ops.logprob.tiling import Range, Tiling, padded
from ratoon.ops.logprob.transform import LogitTransform


def accumulate_dtype_of(dtype: torch.dtype) -> torch.dtype:
    """fp64 stays fp64; everything else sums in fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def add_product_(out: Tensor, left: Tensor, right: Tensor, *, beta: float, alpha: float) -> None:
    """out = beta * out + alpha * left @ right, summed in out's dtype. With beta 0, out may be uninitialised."""
    if left.dtype == out.dtype:
        torch.addmm(out, left, right, beta=beta, alpha=alpha, out=out)
    else:
        torch.addmm(out, left, right, out_dtype=out.dtype, beta=beta, alpha=alpha, out=out)


def tile_of(buffer: Tensor, rows: Range, columns: Range) -> Tensor:
    """[m, v], contiguous, at the start of a flat buffer."""
    m, v = rows[1] - rows[0], columns[1] - columns[0]
    return buffer[: m * v].view(m, v)


def padded_tile_of(buffer: Tensor, rows: Range, columns: Range) -> Tensor:
    """[m, v] at the start of a flat buffer, its rows aligned for wide loads."""
    m, v = rows[1] - rows[0], columns[1] - columns[0]
    return buffer[: m * padded(v)].view(m, padded(v))[:, :v]


def has_tile_kernels(device: torch.device, accumulate_dtype: torch.dtype) -> bool:
    """Whether `tile_kernels` runs here: fp32 sums, a GPU that Triton compiles for, and Triton."""
    return (
        device.type == "cuda"
        and accumulate_dtype == torch.float32
        and torch.cuda.get_device_capability(device) >= (8, 0)
        and find_spec("triton") is not None
    )


@dataclass(frozen=True, slots=True)
class ProductTile:
    """A tile of matrix products, and what turns it into logits."""

    product_mv: Tensor
    """[m, v], gain_in * hidden @ weight.T in the accumulation dtype; rows may be padded."""

    bias_v: Tensor | None
    """[v], contiguous, in the accumulation dtype, times gain_in."""

    target_m: Tensor
    """[m] int64, contiguous: columns of [M, V]."""

    first_column: int
    """The tile's first column in [M, V]."""

    transform: LogitTransform


@dataclass(frozen=True, slots=True)
class Projection:
    """One call's hidden states and language-model head, and the tiles in which their logits are evaluated."""

    hidden_MC: Tensor
    """[M, C], contiguous, in the dtype that the matrix products take."""

    weight_VC: Tensor
    """[V, C] as given; `weight_tile` has the dtype that the matrix products take."""

    bias_V: Tensor | None
    """[V], contiguous, in the accumulation dtype, times gain_in."""

    target_M: Tensor
    """[M] int64, contiguous."""

    transform: LogitTransform
    tiling: Tiling

    accumulate_dtype: torch.dtype
    """Of logits, sums and gradients while they are being added up."""

    kept: KeptTiles | None
    """The tokens that each row's distribution is over; None: all."""

    uses_kernels: bool
    """Tiles go through `tile_kernels`, in one pass each, instead of a dozen operations of torch."""

    @classmethod
    def build(
        cls,
        hidden_MC: Tensor,
        weight_VC: Tensor,
        bias_V: Tensor | None,
        target_M: Tensor,
        transform: LogitTransform,
        kept: KeptTiles | None,
    ) -> "Projection":
        """Nothing here is larger than hidden."""
        accumulate_dtype = accumulate_dtype_of(hidden_MC.dtype)
        # Tensor cores take bf16 and return fp32 sums. Elsewhere low precision is widened, exactly, a piece at a time.
        product_dtype = hidden_MC.dtype if hidden_MC.device.type == "cuda" else accumulate_dtype
        return cls(
            hidden_MC=hidden_MC.to(product_dtype).contiguous(),
            weight_VC=weight_VC,
            bias_V=None if bias_V is None else (bias_V.to(accumulate_dtype) * transform.gain_in).contiguous(),
            target_M=target_M.to(torch.int64).contiguous(),
            transform=transform,
            tiling=Tiling.choose(hidden_MC, weight_VC, accumulate_dtype),
            accumulate_dtype=accumulate_dtype,
            kept=kept,
            uses_kernels=kept is None and has_tile_kernels(hidden_MC.device, accumulate_dtype),
        )

    def new_accumulator(self, *shape: int) -> Tensor:
        """Uninitialised, on the same device, in the accumulation dtype."""
        return torch.empty(shape, dtype=self.accumulate_dtype, device=self.hidden_MC.device)

    def weight_tile(self, columns: Range) -> Tensor:
        """[v, C]."""
        return self.weight_VC[slice(*columns)].to(self.hidden_MC.dtype)

    def product_tile(self, rows: Range, columns: Range, weight_vC: Tensor, out_mv: Tensor) -> ProductTile:
        """The matrix product alone, written to out_mv."""
        hidden_mC = self.hidden_MC[slice(*rows)]
        add_product_(out_mv, hidden_mC, weight_vC.t(), beta=0, alpha=self.transform.gain_in)
        return ProductTile(
            product_mv=out_mv,
            bias_v=None if self.bias_V is None else self.bias_V[slice(*columns)],
            target_m=self.target_M[slice(*rows)],
            first_column=columns[0],
            transform=self.transform,
        )

    def project(self, rows: Range, columns: Range, weight_vC: Tensor, out_mv: Tensor) -> Tensor:
        """y of `LogitTransform`, written to out_mv and returned; -inf where a token is left out."""
        beta = 0
        if self.bias_V is not None:
            beta = 1
            out_mv.copy_(self.bias_V[slice(*columns)].expand_as(out_mv))
        hidden_mC = self.hidden_MC[slice(*rows)]
        add_product_(out_mv, hidden_mC, weight_vC.t(), beta=beta, alpha=self.transform.gain_in)
        if self.transform.softcap is not None:
            out_mv.tanh_()
        return out_mv if self.kept is None else out_mv.masked_fill_(self.kept.left_out(rows, columns), -torch.inf)

    def locate_targets(self, rows: Range, columns: Range) -> tuple[Tensor, Tensor]:
        """Whether each row's target is in this tile [m], and its column there, or a valid one at least [m, 1]."""
        column_m = self.target_M[slice(*rows)] - columns[0]
        width = columns[1] - columns[0]
        inside_m = (column_m >= 0) & (column_m < width)
        return inside_m, column_m.clamp(0, width - 1).unsqueeze(1)


def bits_below_max(projected_mv: Tensor, max_m: Tensor, transform: LogitTransform, out_mv: Tensor) -> Tensor:
    """Logit minus the row's maximum, in bits, negligible ones dropped; written to out_mv (projected_mv is allowed).

    max_m is in projected_mv's units and is rounded once when it is scaled, alike for all of the row. The rest is one
    fused multiply-add an entry, so that an offset common to all logits costs no more digits than in a subtraction.
    """
    offset_m = max_m * -transform.gain_out_bits
    torch.add(offset_m.unsqueeze(1), projected_mv, alpha=transform.gain_out_bits, out=out_mv)
    return drop_negligible_(out_mv)


def drop_negligible_(bits_mv: Tensor) -> Tensor:
    """In place: entries (bits below the maximum) too low to count become a number whose exp2 is exactly 0.

    Two reasons. CPU matrix products are some 200 times slower on subnormal operands, which exp2 would make here, and
    a small gradient times p sooner still. And a masked token's -inf would make 0 * -inf in the entropy.
    The bound is 2^-64 (fp64: 2^-512): all V of them add up to less than the rounding error of the sum. NaN stays NaN.
    """
    if bits_mv.dtype == torch.float64:
        return torch.threshold_(bits_mv, -512.0, -2048.0)
    return torch.threshold_(bits_mv, -64.0, -256.0)
