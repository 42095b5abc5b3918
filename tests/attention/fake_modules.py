"""Modules that stand in for packages a machine may lack."""

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType


@contextmanager
def replaced_modules(fakes: Mapping[str, ModuleType], *, dropped: tuple[str, ...] = ()) -> Iterator[None]:
    """`fakes` are what is imported under their names; `dropped` ones are imported anew, and forgotten at the end.

    Other modules that are imported meanwhile stay: a library that is imported once more each time costs its
    memory each time.
    """
    names = [*fakes, *dropped]
    kept = {name: sys.modules.pop(name) for name in names if name in sys.modules}
    sys.modules.update(fakes)
    try:
        yield
    finally:
        for name in names:
            sys.modules.pop(name, None)
        sys.modules.update(kept)
