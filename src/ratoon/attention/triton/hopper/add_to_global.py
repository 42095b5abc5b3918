"""The copy engine's addition, which Gluon's own `tma` module leaves out."""

# Gluon's functions are typed for its compiler, not for who reads a call.
# pyright: reportAttributeAccessIssue=false

from typing import Any

from triton._C.libtriton import ir
from triton.experimental.gluon.language._core import builtin


@builtin
def add_to_global(tensor_desc: Any, coord: Any, src: Any, _semantic: Any = None) -> None:
    """Adds a tile in shared memory to its place in the tensor, as `tma.async_copy_shared_to_global` copies one."""
    coord = _semantic._convert_to_ir_values(coord, require_i64=False)
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, tensor_desc.handle, coord, src.handle)
