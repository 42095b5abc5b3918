"""Token order of a microbatch: a forest of segments in depth-first order."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ratoon.layout.packed_layout import PackedLayout
    from ratoon.layout.packing import pack_documents, pack_groups
    from ratoon.layout.padding import pad_rows
    from ratoon.layout.radix import pack_sequences

_HOMES = {
    "PackedLayout": "packed_layout",
    "pack_documents": "packing",
    "pack_groups": "packing",
    "pack_sequences": "radix",
    "pad_rows": "padding",
}

__all__ = ["PackedLayout", "pack_documents", "pack_groups", "pack_sequences", "pad_rows"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
