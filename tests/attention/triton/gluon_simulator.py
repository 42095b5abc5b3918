"""Runs Gluon kernels on CPU tensors: each group of warps is a thread, each barrier a real one.

Triton's interpreter does not know Gluon. This knows what our Hopper kernels use, and is stricter than the
hardware where that finds mistakes: shared memory starts as NaN; a product is computed, and a tile leaves shared
memory, at the last moment that the wait for it allows, so that one given back too early is seen overwritten; a value
of a product that was not waited for cannot be read; whoever waits in vain ends the test.
"""

import importlib
import math
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from tests.attention.fake_modules import replaced_modules
from torch import Tensor

WAIT_LIMIT_S = 20.0
WAITS = 100
"""Looks, while waiting, at whether another group has failed."""
_MODULES = (
    "warps", "forward", "forward_wide", "keys", "keys_by_role", "rows", "backward", "backward_wide", "adding", "launch",
)  # fmt: skip
_local = threading.local()


class SimulationError(Exception):
    """The kernel would hang, or read what is not there."""


class Sim(Tensor):
    """A tensor that is a value, and whose `.to(uint32)` compares as unsigned numbers do."""

    def to(self, dtype: Any, *_: Any) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        if dtype == "uint32":
            return self.long() & 0xFFFFFFFF
        return super().to(dtype)

    def __iadd__(self, other: Any) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """A value of a kernel never changes: its name gets another."""
        return self + other


def _sim(value: Any) -> Tensor:
    return torch.as_tensor(value).as_subclass(Sim)


class Pointer:
    def __init__(self, storage: Tensor, offset: Any = 0):
        self.storage, self.offset = storage, offset

    def __add__(self, offset: Any) -> "Pointer":
        return Pointer(self.storage, self.offset + offset)


def _load(pointer: Pointer, mask: Any = True, other: Any = 0) -> Tensor:
    index, mask = torch.broadcast_tensors(torch.as_tensor(pointer.offset), torch.as_tensor(mask))
    if index[mask].numel() and not 0 <= int(index[mask].min()) <= int(index[mask].max()) < pointer.storage.numel():
        raise SimulationError("a load outside its tensor")
    values = pointer.storage[torch.where(mask, index, 0).long()]
    return _sim(torch.where(mask, values, torch.tensor(other, dtype=values.dtype)))


def _store(pointer: Pointer, value: Tensor, mask: Any = True) -> None:
    index, value, mask = torch.broadcast_tensors(torch.as_tensor(pointer.offset), value, torch.as_tensor(mask))
    pointer.storage[index[mask].long()] = value[mask].to(pointer.storage.dtype).as_subclass(Tensor)


@dataclass
class Descriptor:
    """Gluon's host-side TensorDescriptor, and what a kernel sees of it."""

    base: Tensor
    tensor_shape: list[int]
    strides: list[int]
    block: list[int]
    layout: Any = None

    def __post_init__(self) -> None:
        size = self.base.element_size()
        assert self.base.data_ptr() % 16 == 0 and all(s * size % 16 == 0 for s in self.strides[:-1])
        assert self.strides[-1] == 1
        self.dtype = self.base.dtype
        self.block_type = SimpleNamespace(shape=self.block, nbytes=math.prod(self.block) * size)

    def rows(self, coordinates: list[Any]) -> tuple[Tensor, tuple[slice, ...]]:
        """What of the tensor lies in the block, and where in the block."""
        starts = [int(c) for c in coordinates]
        sizes = [max(min(s + b, n) - s, 0) for s, b, n in zip(starts, self.block, self.tensor_shape, strict=True)]
        view = self.base[tuple(slice(s, s + n) for s, n in zip(starts, sizes, strict=True))]
        return view, tuple(slice(0, n) for n in sizes)


@dataclass
class Shared:
    """Shared memory, or a part of it."""

    data: Tensor

    @property
    def shape(self) -> list[int]:
        return list(self.data.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.data.dtype

    def index(self, index: Any) -> "Shared":
        return Shared(self.data[int(index)])

    def reshape(self, shape: list[int]) -> "Shared":
        return Shared(self.data.view(shape))

    def slice(self, start: int, length: int) -> "Shared":
        return Shared(self.data[start : start + length])

    def _reinterpret(self, dtype: torch.dtype, shape: list[int], _: Any) -> "Squares":
        assert dtype == self.dtype and math.prod(shape) == self.data.numel(), "the same memory"
        return Squares(self, shape[1])

    def permute(self, order: list[int]) -> "Shared":
        return Shared(self.data.permute(order))

    def load(self, _: Any) -> Tensor:
        return _sim(self.data.clone())

    def store(self, value: Tensor) -> None:
        assert value.dtype == self.dtype, "stores do not convert"
        self.data.copy_(value.as_subclass(Tensor))


@dataclass
class Squares:
    """Tiles [.., N, columns] as squares: rows of a tile follow one another, in blocks of columns."""

    tiles: Shared
    side: int

    def index(self, index: Any) -> Shared:
        num_rows, num_columns = self.tiles.shape[1], self.tiles.shape[-1]
        tile, within = divmod(int(index), num_rows * num_columns // self.side**2)
        block, part = divmod(within, num_rows // self.side)
        data = self.tiles.data.view(-1, num_rows, num_columns)[tile]
        rows, columns = (slice(i * self.side, (i + 1) * self.side) for i in (part, block))
        return Shared(data[rows, columns])


@dataclass
class Barrier:
    count: int = 0
    phase: int = 0
    pending: int = 0
    pending_bytes: int = 0
    changed: threading.Condition = field(default_factory=threading.Condition)

    def arrive(self, count: int, num_bytes: int = 0) -> None:
        with self.changed:
            self.pending -= count
            self.pending_bytes += num_bytes
            self._advance()

    def complete(self, num_bytes: int) -> None:
        with self.changed:
            self.pending_bytes -= num_bytes
            self._advance()

    def _advance(self) -> None:
        if self.pending < 0:
            raise SimulationError("more arrivals than the barrier counts")
        if self.pending == 0 and self.pending_bytes == 0:
            self.phase ^= 1
            self.pending = self.count
            self.changed.notify_all()

    def wait(self, parity: int) -> None:
        with self.changed:
            for _ in range(WAITS):
                if self.changed.wait_for(lambda: self.phase != parity, WAIT_LIMIT_S / WAITS):
                    return
                if _local.failed():
                    raise SimulationError("another group failed")
        raise SimulationError("a group waits in vain")


@dataclass
class Barriers:
    list: list[Barrier]

    def index(self, index: Any) -> Barrier:
        return self.list[int(index)]


class Product:
    """A product in flight, computed when it is waited for."""

    def __init__(self, compute: Callable[[], Tensor]):
        self.compute, self.value = compute, None

    def finish(self) -> Tensor:
        if self.value is None:
            self.value = self.compute()
        return self.value


def _mma(a: Any, b: Shared, acc: Any, use_acc: bool = True, is_async: bool = False) -> Any:
    assert is_async, "our kernels wait themselves"

    def compute() -> Tensor:
        left = a.data if isinstance(a, Shared) else a
        product = left.float() @ b.data.float()
        if not use_acc:
            return _sim(product)
        # A product may be added to while it is in flight: the tensor cores work in order.
        return _sim(product + (acc.finish() if isinstance(acc, Product) else acc))

    product = Product(compute)
    _local.in_flight.append(product)
    return product


def _mma_wait(num_outstanding: int = 0, deps: Any = ()) -> Any:
    while len(_local.in_flight) > num_outstanding:
        _local.in_flight.pop(0).finish()
    results = []
    for dep in deps:
        if isinstance(dep, Product):
            if dep.value is None:
                raise SimulationError("a wait that leaves what it returns in flight")
            dep = dep.value
        results.append(dep)
    return results[0] if len(results) == 1 else tuple(results)


def _tma_load(desc: Descriptor, coordinates: list[Any], barrier: Barrier, smem: Shared) -> None:
    smem.data.zero_()
    view, place = desc.rows(coordinates)
    smem.data[place] = view
    barrier.complete(desc.block_type.nbytes)


def _tma_store(desc: Descriptor, coordinates: list[Any], smem: Shared) -> None:
    view, place = desc.rows(coordinates)
    _local.leaving.append(lambda: view.copy_(smem.data[place]))


_adding = threading.Lock()


def _tma_add(desc: Descriptor, coordinates: list[Any], smem: Shared) -> None:
    view, place = desc.rows(coordinates)

    def add() -> None:
        with _adding:
            view.add_(smem.data[place])

    _local.leaving.append(add)


def _store_wait(num_outstanding: int) -> None:
    while len(_local.leaving) > num_outstanding:
        _local.leaving.pop(0)()


def _warp_specialize(partitions: Any, worker_num_warps: list[int], worker_num_regs: list[int]) -> None:
    assert len(worker_num_warps) == len(worker_num_regs) == len(partitions) - 1
    failures: list[BaseException] = []
    program = _local.program

    def run(function: Callable[..., None], args: tuple[Any, ...]) -> None:
        _local.program, _local.in_flight, _local.leaving = program, [], []
        _local.failed = lambda: bool(failures)
        try:
            with torch.no_grad():  # a setting of each thread
                function(*args)
            assert not _local.in_flight, "a group ends with products in flight"
            assert not _local.leaving, "a group ends while its shared memory is read"
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=partition, daemon=True) for partition in partitions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * WAIT_LIMIT_S)
    if failures:
        raise failures[0]


def _allocate(dtype: Any, shape: list[int], layout: Any) -> Any:
    if dtype == torch.int64:
        return Barriers([Barrier() for _ in range(shape[0])])
    return Shared(torch.full(shape, torch.nan if dtype.is_floating_point else torch.iinfo(dtype).min, dtype=dtype))


def _init(barrier: Barrier, count: int) -> None:
    barrier.count = barrier.pending = count


class Kernel:
    """What `gluon.jit` makes: called from a kernel it is the function, launched it runs every program."""

    def __init__(self, function: Callable[..., Any]):
        self.function = function

    def __call__(self, *args: Any) -> Any:
        return self.function(*args)

    def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
        def launch(*args: Any, num_warps: int, **constants: Any) -> None:
            pointers = [
                Pointer(arg.as_strided((arg.untyped_storage().nbytes() // arg.element_size(),), (1,), 0))
                if isinstance(arg, Tensor)
                else arg
                for arg in args
            ]
            for program in range(grid[0]):
                _local.program = program
                self.function(*pointers, **constants)

        return launch


def _jit(function: Callable[..., Any] | None = None, **_: Any) -> Any:
    """`gluon.jit`, with options or without: they are the compiler's."""
    return Kernel if function is None else Kernel(function)


def _assembled(asm: str, args: list[Tensor]) -> Tensor:
    """What our pieces of assembly compute."""
    if "cvt.rn.bf16x2" in asm or "cvt.rn.f16x2" in asm:
        return _sim(args[0].to(torch.bfloat16 if "bf16x2" in asm else torch.float16).to(torch.float32))
    if "setp.lt.u32" in asm:
        values, x, y = (_sim(arg) for arg in args)
        return _sim(torch.where(x.to("uint32") < y.to("uint32"), values, -math.inf))
    assert "bar.warp.sync" in asm, f"the simulator does not know {asm}"
    return args[0]


def _language() -> ModuleType:
    gl: Any = ModuleType("gl")
    gl.constexpr = lambda value: value
    gl.float32, gl.bfloat16, gl.int64, gl.uint32 = torch.float32, torch.bfloat16, torch.int64, "uint32"
    gl.program_id = lambda _: _sim(_local.program)
    gl.static_range = range
    gl.to_tensor = _sim
    gl.load, gl.store = _load, _store
    gl.allocate_shared_memory = _allocate
    gl.arange = lambda start, end, layout: _sim(torch.arange(start, end, dtype=torch.int32))
    gl.zeros = lambda shape, dtype, layout: _sim(torch.zeros(shape, dtype=dtype))
    gl.full = lambda shape, value, dtype, layout: _sim(torch.full(shape, value, dtype=dtype))
    gl.where = lambda mask, x, y: _sim(torch.where(torch.as_tensor(mask), torch.as_tensor(x), torch.as_tensor(y)))
    gl.maximum = lambda x, y: torch.maximum(x, torch.as_tensor(y, dtype=x.dtype))
    gl.max = lambda x, axis: x.amax(dim=axis)
    gl.sum = lambda x, axis: x.sum(dim=axis)
    gl.exp2, gl.log2 = torch.exp2, torch.log2
    gl.convert_layout = lambda x, layout: x
    gl.inline_asm_elementwise = lambda asm, constraints, args, **_: _assembled(asm, args)
    gl.warp_specialize = _warp_specialize
    gl.NVMMADistributedLayout = gl.SliceLayout = gl.DotOperandLayout = gl.SwizzledSharedLayout = lambda *args, **_: None
    gl.NVMMASharedLayout = type("NVMMASharedLayout", (), {
        "__init__": lambda self, *args, **_: None,
        "get_default_for": staticmethod(lambda *args: None),
    })  # fmt: skip
    return gl


def _hopper() -> ModuleType:
    hopper: Any = ModuleType("hopper")
    hopper.fence_async_shared = lambda: None
    hopper.warpgroup_mma, hopper.warpgroup_mma_wait = _mma, _mma_wait
    hopper.mbarrier = SimpleNamespace(
        MBarrierLayout=lambda: None,
        init=_init,
        expect=lambda barrier, num_bytes: barrier.arrive(1, num_bytes),
        arrive=lambda barrier: barrier.arrive(1),
        wait=lambda barrier, parity: barrier.wait(int(parity)),
    )
    hopper.tma = SimpleNamespace(
        async_copy_global_to_shared=_tma_load,
        async_copy_shared_to_global=_tma_store,
        store_wait=_store_wait,
    )
    return hopper


def simulated_hopper() -> Any:
    """A second copy of `ratoon.attention.triton.hopper.launch`, whose launches run on this simulator."""
    gl, hopper, host = _language(), _hopper(), ModuleType("host")
    host.TensorDescriptor = Descriptor  # pyright: ignore[reportAttributeAccessIssue]
    experimental: Any = ModuleType("triton.experimental")
    gluon: Any = ModuleType("triton.experimental.gluon")
    gluon.jit, gluon.language, experimental.gluon = _jit, gl, gluon
    package = "ratoon.attention.triton.hopper"
    fakes: dict[str, Any] = {
        "triton.experimental": experimental,
        "triton.experimental.gluon": gluon,
        "triton.experimental.gluon.language": gl,
        "triton.experimental.gluon.language.nvidia.hopper": hopper,
        "triton.experimental.gluon.nvidia.hopper": host,
    }
    scores: Any = ModuleType("scores")
    scores.LOG2E, scores.LN2 = math.log2(math.e), math.log(2)
    fakes["ratoon.attention.triton.scores"] = scores
    adding: Any = ModuleType("add_to_global")
    adding.add_to_global = _tma_add
    fakes[f"{package}.add_to_global"] = adding
    names = tuple(f"{package}.{module}" for module in _MODULES)
    with replaced_modules(fakes, dropped=names):
        launch: Any = importlib.import_module(f"{package}.launch")
    return launch
