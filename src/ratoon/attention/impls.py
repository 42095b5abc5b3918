"""Which implementations can run here, and which ones a call gets."""

from dataclasses import dataclass, replace
from functools import cache, lru_cache

from ratoon.attention import specs
from ratoon.attention.choice_table import TABLE_FILE, ChoiceRow, ChoiceTable, architecture_of, rows_for, shipped_rows
from ratoon.attention.request import AttentionRequest
from ratoon.attention.specs import OF_BACKWARD, OF_FORWARD, SPECS, ImplSpec, device_types_of, spec_named

IMPL_NAMES = ("auto", *dict.fromkeys((*(spec.impl for spec in SPECS), *(spec.name for spec in SPECS))))
"""What `impl=` may be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImplStatus:
    """Whether an implementation can run on this machine."""

    name: str
    impl: str
    provider: str
    is_available: bool

    reason: str
    """Why not; what it runs on where it can."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImplChoice:
    """What a call gets, and why."""

    forward: str
    """Name of the implementation whose kernel makes the output."""

    backward: str
    """Name of the implementation whose kernel makes the gradients."""

    reason: str

    @property
    def impl(self) -> str:
        return spec_named(self.forward).impl

    @property
    def provider(self) -> str:
        return spec_named(self.forward).provider

    @property
    def kernels(self) -> str:
        return f"forward {self.forward}, backward {self.backward}"


def available_impls() -> tuple[ImplStatus, ...]:
    """Every implementation, in the order in which `auto` prefers them where its table says nothing."""
    return tuple(
        ImplStatus(
            name=spec.name,
            impl=spec.impl,
            provider=spec.provider,
            is_available=specs.why_not_here(spec.name) is None,
            reason=specs.why_not_here(spec.name) or f"runs on {_device_names(spec)}",
        )
        for spec in SPECS
    )


def resolve_impl(request: AttentionRequest, impl: str = "auto") -> ImplChoice:
    """The implementations that serve the request: those named, or for `auto` those its table prefers.

    impl: of `IMPL_NAMES`. Where several providers have the name, the first that can serve.
    Raises ValueError, naming what is missing and who has it, where the named one cannot serve.
    """
    if not isinstance(impl, str) or impl not in IMPL_NAMES:
        raise ValueError(f"impl must be one of {', '.join(map(repr, IMPL_NAMES))}, got {impl!r}")
    return _resolve_known_impl(request, impl)


@lru_cache(maxsize=1024)
def _resolve_known_impl(request: AttentionRequest, impl: str) -> ImplChoice:
    refusals: dict[str, None] = {}
    if impl == "auto":
        for row in rows_for(choice_table(), architecture_of(request.device_type)):
            if row.holds_for(request):
                forward, backward = spec_named(row.forward), spec_named(row.backward)
                why = f"{TABLE_FILE}, {row.name}: {row.measured}"
                problem = _problem(forward, backward, request)
                if problem is None:
                    return _choice(forward, backward, why, refusals)
                refusals[problem] = None
    for spec in _specs_named(impl, request.device_type):
        problem = _problem(spec, spec, request)
        if problem is None:
            why = "the first that has all that is asked for" if impl != spec.name else "asked for by name"
            return _choice(spec, spec, why, refusals)
        refusals[problem] = None
    raise ValueError(
        f"impl={impl!r} cannot run this attention: {'; '.join(refusals)}. "
        f"Implementations that can: {_who_has(request)}; 'auto' takes the one that its table prefers"
    )


def forget_choices() -> None:
    """For a machine that has changed since it was asked: a package installed, an environment variable set."""
    _resolve_known_impl.cache_clear()


def explain_choice(request: AttentionRequest, impl: str, label: str) -> str:
    """A line for logs: both kernels, the label in brackets, and why. Raises ValueError as `resolve_impl` does.

    Says too which kernels layouts of few rows get, where they get others.
    """
    choice = resolve_impl(request, impl)
    line = f"{choice.kernels} ({label}): {choice.reason}"
    for limit in _row_limits(request):
        of_few = resolve_impl(replace(request, num_rows=limit - 1), impl)
        if of_few.kernels != choice.kernels:
            line += f"; {of_few.kernels} in layouts of fewer than {limit} rows"
    return line


@cache
def choice_table() -> ChoiceTable:
    """The shipped table, checked against what the implementations can do."""
    table = shipped_rows()
    for row in (row for rows in table.values() for row in rows):
        check_row(row)
    return table


def check_row(row: ChoiceRow) -> None:
    """Raises ValueError for a row that no call could ever take."""
    for name in (row.forward, row.backward):
        if name not in specs.SPEC_OF_NAME:
            raise ValueError(
                f"{row.name}: there is no implementation {name!r}; there are {', '.join(specs.SPEC_OF_NAME)}"
            )
    forward, backward = spec_named(row.forward), spec_named(row.backward)
    if forward is not backward and (forward.has_own_autograd or backward.has_own_autograd):
        raise ValueError(f"{row.name}: {row.forward} and {row.backward} cannot be paired; name one of them twice")
    for spec, kernel, relevant in (
        (forward, forward.forward, OF_FORWARD),
        (backward, backward.backward, OF_BACKWARD),
    ):
        lacking: list[str] = sorted(row.wanted & relevant - kernel.features)
        if row.head_dims is not None:
            smallest, largest = row.head_dims
            if kernel.max_head_dim is not None and smallest > kernel.max_head_dim:
                lacking.append(f"head dim {smallest}")
            if largest < kernel.min_head_dim:
                lacking.append(f"head dim {largest}")
        if spec.architectures is not None and row.architecture not in (*spec.architectures, "any"):
            lacking.append(f"kernels for {row.architecture}")
        if row.architecture != "any" and spec.device_types is not None:
            device_type = "cpu" if row.architecture == "cpu" else "cuda"
            lacking += [f"device {device_type}"] if device_type not in spec.device_types else []
        if lacking:
            raise ValueError(f"{row.name}: {spec.name} has no {', '.join(lacking)}, so that no call would take it")


def _choice(forward: ImplSpec, backward: ImplSpec, why: str, refusals: dict[str, None]) -> ImplChoice:
    return ImplChoice(forward=forward.name, backward=backward.name, reason="; ".join([why, *refusals]))


def _specs_named(impl: str, device_type: str) -> list[ImplSpec]:
    """The providers of an implementation on the device (for `auto`, of all); all providers where none fits."""
    named = [spec for spec in SPECS if (spec.is_for_auto if impl == "auto" else impl in (spec.impl, spec.name))]
    return [spec for spec in named if (types := device_types_of(spec)) is None or device_type in types] or named


def _problem(forward: ImplSpec, backward: ImplSpec, request: AttentionRequest) -> str | None:
    """What keeps the pair from serving the request here."""
    problems: list[str] = []
    for spec in dict.fromkeys((forward, backward)):
        missing = spec.lacks(request, in_forward=spec is forward, in_backward=spec is backward)
        why_not = None if missing else specs.why_not_here(spec.name)
        if missing:
            problems.append(f"{spec.name} has no {', '.join(missing)}")
        elif why_not:
            problems.append(f"{spec.name} cannot run here: {why_not}")
    return "; ".join(problems) or None


def _who_has(request: AttentionRequest) -> str:
    return ", ".join(spec.name for spec in SPECS if _problem(spec, spec, request) is None) or "none"


def _row_limits(request: AttentionRequest) -> list[int]:
    rows = rows_for(choice_table(), architecture_of(request.device_type))
    return sorted({row.rows_below for row in rows if row.rows_below is not None})


def _device_names(spec: ImplSpec) -> str:
    device_types = device_types_of(spec)
    return "any device" if device_types is None else ", ".join(sorted(device_types))
