"""Rollout engines on the same prompts: tokens a second, and how far their log-probs are from the trainer's.

Ways of one engine:

- `shared`: groups of N responses, all of the same length.
- `replicated`: as many responses, each with a prompt of its own; the engine is not told that they are equal.
- `natural`: groups whose responses end by chance, after half of the longest length on average.
- `updates`: `shared`, with new weights every 20 tokens. (They are the same weights, under a new version.)

No speed is reported where an engine's log-probs are farther from those of the same weights in twice the precision than
the trainer's are, or where a response is lost, given twice, or has versions that fall. (The distance to the trainer's
own says little of random weights: both round, and a deep one's rounding grows through its layers.) Nor where a
batch-invariant model's differ from the trainer's in a single bit.
"""

# Shape letters: P prompt tokens, R response tokens, N responses of a group, M scored tokens.

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast, get_args

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from ratoon.bench import choosing
from ratoon.bench.outcome import CannotRunError, Outcome, WrongResultError, free_memory
from ratoon.bench.policy_update import cases as update_cases
from ratoon.bench.policy_update.random_model import decoder_config, smollm2_config
from ratoon.bench.rows import BenchRow, append_rows
from ratoon.bench.vllm_alone import VllmAlone
from ratoon.layout import pack_groups
from ratoon.models import FreshModelConfig, attach, forward_logprobs, fresh_tokenizer
from ratoon.models.invariant import check_machine
from ratoon.rollout import RolloutConfig, RolloutEngine, build_engine
from ratoon.types import Prompt, RolloutGroup, SamplingParams, UserError

Way = Literal["shared", "replicated", "natural", "updates"]

INVARIANT = "paged-invariant"
"""`paged` on a batch-invariant model (`model.batch_invariant`)."""

OURS = ("paged", INVARIANT)
_USUAL = ("paged",)
ALONE = "vllm-generate"
"""vLLM without our adapter: see `VllmAlone`."""

PEERS = ("transformers", "vllm", ALONE)

UPDATE_TOKENS = 20
"""Tokens of each response between two updates of weights."""

ERROR_OVER_TRAINERS = 1.25
"""Of the engine's mean absolute log-prob error. A wrong key or position makes it ten times or more."""

LEAST_ERROR = 1e-4
"""In nats: allowed whatever the trainer's is."""

WORST_OVER_TRAINERS = 3.0
"""Of the engine's largest log-prob error: a few wrong tokens among thousands hardly move the mean."""

LEAST_WORST = 1e-3

_SCORED_ROWS = 16_384
_SEED = 0
_LABEL_WIDTH = 24


@dataclass(frozen=True, kw_only=True)
class RolloutCase:
    """`concurrency` responses of R tokens to prompts of P, N to each."""

    name: str
    model: str
    config: Callable[[], PreTrainedConfig]
    concurrency: int
    P: int
    N: int
    R: int
    needs_gpu: bool = True

    @property
    def key(self) -> dict[str, Any]:
        """The `case` of a result row."""
        return {"model": self.model, "concurrency": self.concurrency, "P": self.P, "N": self.N, "R": self.R}

    def prompts(self, vocab_size: int) -> list[Prompt]:
        """Random tokens; one for each group."""
        rng = np.random.default_rng(_SEED)
        return [Prompt(f"p{index}", rng.integers(0, vocab_size, self.P)) for index in range(self.concurrency // self.N)]


def _qwen3_1_7b() -> PreTrainedConfig:
    return decoder_config(update_cases.CASES["1.7b-p8192-r512-n16"].decoder)


def _tiny() -> PreTrainedConfig:
    return decoder_config(update_cases.CASES["tiny"].decoder)


_CASES = (
    RolloutCase(
        name="135m-c256-p512-n8-r256", model="SmolLM2-135M", config=smollm2_config, concurrency=256, P=512, N=8, R=256
    ),
    RolloutCase(
        name="1.7b-c256-p512-n8-r256", model="Qwen3-1.7B", config=_qwen3_1_7b, concurrency=256, P=512, N=8, R=256
    ),
    # 64, because as many copies of the prompt must fit beside one another: 65 GiB of keys.
    RolloutCase(
        name="1.7b-c64-p8192-n16-r512", model="Qwen3-1.7B", config=_qwen3_1_7b, concurrency=64, P=8192, N=16, R=512
    ),
    RolloutCase(
        name="135m-c16-p128-n8-r32",
        model="SmolLM2-135M", config=smollm2_config, concurrency=16, P=128, N=8, R=32, needs_gpu=False,
    ),
    RolloutCase(
        name="tiny", model="tiny-Qwen3", config=_tiny, concurrency=12, P=37, N=4, R=61, needs_gpu=False
    ),
)  # fmt: skip
CASES = {case.name: case for case in _CASES}


def bench_rollout(
    *,
    cases: Sequence[str] | None = None,
    impls: Sequence[str] | None = None,
    peers: Sequence[str] | None = None,
    ways: Sequence[str] | None = None,
    repeats: int,
    command: str,
    results: Path | None = None,
    say: Callable[[str], None] = print,
) -> Outcome:
    """Checks and times each case in each way, with each engine.

    None takes the usual ones: of the machine's cases, ours among engines, every way. repeats: timed runs of a way; the
    best counts. Raises UserError for a name that does not exist, before anything runs.
    """
    has_gpu = torch.cuda.is_available()
    names = cases or [case.name for case in CASES.values() if case.needs_gpu == has_gpu]
    chosen = choosing.choose_cases(names, CASES, "rollout case", has_gpu=has_gpu)
    engines = [*choosing.choose_names(impls, OURS, _USUAL, "engine of ours")]
    engines += choosing.choose_names(peers, PEERS, () if has_gpu else ("transformers",), "engine of others")
    in_ways = cast(list[Way], choosing.choose_names(ways, get_args(Way), get_args(Way), "way"))
    device = torch.device("cuda", torch.cuda.current_device()) if has_gpu else torch.device("cpu")
    outcome = Outcome()
    for case in chosen:
        say(
            f"{case.name}: {case.model}, {case.concurrency} responses of {case.R:,} tokens, "
            f"{case.N} to each prompt of {case.P:,}"
        )
        model = _build_model(case, device)
        exact = _in_twice_the_precision(case, model)
        for name in engines:
            its_own = model if name != INVARIANT else None
            if its_own is None:
                with outcome.noting(case.name, name, say, is_ours=True, width=_LABEL_WIDTH):
                    its_own = _build_invariant(case, device)
            if its_own is None:
                continue
            run = _EngineRun(case=case, model=its_own, exact=exact, engine_name=name, repeats=repeats, command=command)
            for way in in_ways:
                label = f"{name} {way}"
                with outcome.noting(case.name, label, say, is_ours=name in OURS, width=_LABEL_WIDTH):
                    row = asyncio.run(run.measure(way))
                    say(_line(label, row))
                    outcome.rows.append(row)
                    if results is not None:
                        append_rows(results, [row])
                free_memory()
            del run, its_own
        del model, exact
        torch.compiler.reset()
        free_memory()
    return outcome


def _build_model(case: RolloutCase, device: torch.device, *, batch_invariant: bool = False) -> PreTrainedModel:
    """Random weights of the device's usual dtype, attached: the same ones at every call."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), device:
        torch.manual_seed(_SEED)
        model = AutoModelForCausalLM.from_config(case.config(), dtype=dtype)
        return attach(model, batch_invariant=batch_invariant).eval()


def _build_invariant(case: RolloutCase, device: torch.device) -> PreTrainedModel:
    """Raises CannotRunError where its kernels cannot run."""
    try:
        check_machine(device)
    except UserError as error:
        raise CannotRunError(str(error)) from error
    return _build_model(case, device, batch_invariant=True)


def _in_twice_the_precision(case: RolloutCase, model: PreTrainedModel) -> PreTrainedModel:
    """The same weights, attached: 32 bits for 16, 64 for 32."""
    dtype = torch.float64 if model.dtype == torch.float32 else torch.float32
    with model.device:
        exact = AutoModelForCausalLM.from_config(case.config(), dtype=dtype)
    exact.load_state_dict(model.state_dict())
    return attach(exact).eval()


@dataclass(frozen=True, slots=True)
class _Sample:
    """All responses, once."""

    seconds: float
    groups: list[RolloutGroup]
    num_updates: int

    @property
    def num_tokens(self) -> int:
        return sum(sum(group.response_lengths) for group in self.groups)

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.seconds


class _EngineRun:
    """One case with one engine."""

    def __init__(
        self,
        *,
        case: RolloutCase,
        model: PreTrainedModel,
        exact: PreTrainedModel,
        engine_name: str,
        repeats: int,
        command: str,
    ) -> None:
        self.case = case
        self.model = model
        self.exact = exact
        self.engine_name = engine_name
        self.repeats = repeats
        self.command = command
        self.tokenizer: PreTrainedTokenizerBase = fresh_tokenizer(FreshModelConfig())
        self.is_cuda = model.device.type == "cuda"
        self.eos_ids: list[int] = []
        self.generate_s: dict[Way, float] = {}
        """Best of each way so far."""

    async def measure(self, way: Way) -> BenchRow:
        """Raises WrongResultError where a check is red."""
        case = self.case
        self._end_by_chance(way == "natural")
        if self.is_cuda:
            torch.cuda.reset_peak_memory_stats(self.model.device)
        before = torch.cuda.memory_allocated(self.model.device) if self.is_cuda else 0
        engine = self._build(way)
        try:
            started = time.perf_counter()
            await self._generate(engine, way, step=0, max_tokens=case.R)
            first_call_s = time.perf_counter() - started
            is_here = self.is_cuda and not isinstance(engine, VllmAlone)
            peak = torch.cuda.max_memory_allocated(self.model.device) - before if is_here else None
            first_tokens = await self._timed(engine, way, step=1, max_tokens=1)
            if way == "updates" and "shared" not in self.generate_s:  # it says how long 20 tokens take
                undisturbed = await self._timed(engine, "shared", step=1, max_tokens=case.R)
                self.generate_s["shared"] = undisturbed.seconds
            samples: list[_Sample] = []
            for step in range(2, 2 + self.repeats):
                samples.append(await self._timed(engine, way, step=step, max_tokens=case.R))
                _check_complete(samples[-1].groups, case, way)
        finally:
            await engine.close()
        best = max(samples, key=lambda sample: sample.tokens_per_s)
        gaps = self._logprob_gaps(best.groups)
        self.generate_s[way] = best.seconds
        figures: dict[str, float | int | str | bool | None] = {
            "way": way,
            "tokens_per_s": best.tokens_per_s,
            "generate_s": best.seconds,
            "first_tokens_s": first_tokens.seconds,
            "first_call_s": first_call_s,
            "num_tokens": best.num_tokens,
            "engine_peak_gib": None if peak is None else peak / 2**30,
            "num_updates": best.num_updates,
            **gaps,
            "timing": "wall clock of all responses together, prompts included; the best of the repeats counts",
        }
        return BenchRow(
            bench="rollout",
            case=case.key,
            impl=self.engine_name,
            layout="replicated" if way == "replicated" else "shared",
            peer=self.engine_name in PEERS,
            figures=figures,
            command=self.command,
        )

    def _build(self, way: Way) -> RolloutEngine | VllmAlone:
        if self.engine_name != ALONE:
            return build_engine(self._config(), self.model, self.tokenizer)
        if way == "updates":
            raise CannotRunError("new weights while it generates are what the adapter `vllm` is for")
        return VllmAlone(self.model, max_concurrent_responses=self.case.concurrency)

    def _config(self) -> RolloutConfig:
        case = self.case
        return RolloutConfig.model_validate(
            {
                "engine": "paged" if self.engine_name == INVARIANT else self.engine_name,
                "prompts_per_step": case.concurrency // case.N,
                "group_size": case.N,
                "max_response_tokens": case.R,
                "max_concurrent_responses": case.concurrency,
            }
        )

    def _end_by_chance(self, ends: bool) -> None:
        """Tokens of random weights are about equally likely: 2 in R of them as ends make R / 2 the mean length."""
        num_ends = max(1, round(2 * self.model.config.vocab_size / self.case.R)) if ends else 0
        self.eos_ids = list(range(num_ends))
        assert self.model.generation_config is not None, "transformers gives every decoder one"
        self.model.generation_config.eos_token_id = self.eos_ids or [-1]  # no token, and not the tokenizer's

    async def _timed(self, engine: RolloutEngine | VllmAlone, way: Way, *, step: int, max_tokens: int) -> "_Sample":
        period_s = self.generate_s.get("shared", 0.0) * UPDATE_TOKENS / self.case.R
        started = time.perf_counter()
        generating = asyncio.ensure_future(self._generate(engine, way, step=step, max_tokens=max_tokens))
        num_updates = 0
        while way == "updates" and max_tokens > 1:
            done, _ = await asyncio.wait([generating], timeout=period_s)
            if done:
                break
            assert not isinstance(engine, VllmAlone), "it is not asked for updates"
            await engine.update_weights(self.model.state_dict(), engine.policy_version + 1)
            num_updates += 1
        groups = await generating
        return _Sample(time.perf_counter() - started, groups, num_updates)

    async def _generate(
        self, engine: RolloutEngine | VllmAlone, way: Way, *, step: int, max_tokens: int
    ) -> list[RolloutGroup]:
        case = self.case
        sampling = SamplingParams(temperature=1.0, max_response_tokens=max_tokens, seed=_SEED)
        prompts, group_size = case.prompts(self.model.config.vocab_size), case.N
        if way == "replicated":
            copies = [Prompt(f"{prompt.id}-{n}", prompt.token_ids) for prompt in prompts for n in range(case.N)]
            prompts, group_size = copies, 1
        if isinstance(engine, VllmAlone):
            return await engine.generate_all(prompts, group_size=group_size, sampling=sampling, eos_ids=self.eos_ids)
        calls = (engine.generate(prompt, group_size=group_size, sampling=sampling, step=step) for prompt in prompts)
        return list(await asyncio.gather(*calls))

    def _logprob_gaps(self, groups: Sequence[RolloutGroup]) -> dict[str, float]:
        """Raises WrongResultError where the engine is less exact than the trainer."""
        scored = _scored(groups)
        packed = pack_groups(scored)
        with torch.no_grad():
            trainer_M, exact_M = (
                forward_logprobs(model, packed)[0].double().cpu().numpy() for model in (self.model, self.exact)
            )
        rollout = [response.rollout_logprobs for group in scored for response in group.responses]
        assert all(logprobs is not None for logprobs in rollout), "the engine gave no log-probs"
        engine_M = np.concatenate([logprobs for logprobs in rollout if logprobs is not None])
        engine_error_M, trainer_error_M = (np.abs(found_M - exact_M) for found_M in (engine_M, trainer_M))
        engine, trainer = float(engine_error_M.mean()), float(trainer_error_M.mean())
        worst, trainers_worst = float(engine_error_M.max()), float(trainer_error_M.max())
        for out_by, trainers, allowed, where in (
            (engine, trainer, max(LEAST_ERROR, ERROR_OVER_TRAINERS * trainer), "on average"),
            (worst, trainers_worst, max(LEAST_WORST, WORST_OVER_TRAINERS * trainers_worst), "at the worst token"),
        ):
            if not out_by <= allowed:
                raise WrongResultError(
                    f"log-probs out by {out_by:.3g} {where} of the same weights in {self.exact.dtype}, the trainer's "
                    f"by {trainers:.3g} (allowed {allowed:.3g})"
                )
        gap_M = np.abs(engine_M - trainer_M)
        if self.engine_name == INVARIANT and gap_M.max() != 0.0:
            raise WrongResultError(
                f"{int((gap_M != 0).sum())} of {gap_M.size} log-probs of a batch-invariant model differ from the "
                f"trainer's, by up to {gap_M.max():.3g}"
            )
        return {
            "mean_abs_logprob_gap": float(gap_M.mean()),
            "max_abs_logprob_gap": float(gap_M.max()),
            "mean_abs_logprob_error": engine,
            "trainer_mean_abs_logprob_error": trainer,
        }


def _scored(groups: Sequence[RolloutGroup]) -> list[RolloutGroup]:
    """About `_SCORED_ROWS` rows of them, from the first to the last: those give way where blocks run out."""
    num_rows = sum(group.prompt.num_tokens + sum(group.response_lengths) for group in groups)
    num_groups = min(len(groups), max(2, -(-_SCORED_ROWS * len(groups) // num_rows)))
    return [groups[index] for index in np.linspace(0, len(groups) - 1, num_groups).round().astype(int)]


def _check_complete(groups: Sequence[RolloutGroup], case: RolloutCase, way: Way) -> None:
    """Raises WrongResultError where a response is missing, too short, or has versions that fall."""
    responses = [response for group in groups for response in group.responses]
    if len(responses) != case.concurrency:
        raise WrongResultError(f"{len(responses)} responses came back of {case.concurrency}")
    if len({group.prompt.id for group in groups}) != len(groups):
        raise WrongResultError("two groups came back for one prompt")
    for response in responses:
        if way != "natural" and response.num_tokens != case.R:
            raise WrongResultError(f"a response has {response.num_tokens} tokens instead of {case.R}")
        if response.policy_versions is None or (np.diff(response.policy_versions) < 0).any():
            raise WrongResultError("the versions of a response's tokens fall, or are missing")


def _line(label: str, row: BenchRow) -> str:
    figures = row.figures
    memory = figures["engine_peak_gib"]
    return (
        f"  {label:<{_LABEL_WIDTH}} {figures['tokens_per_s']:>9,.0f} tokens/s, first tokens after "
        f"{figures['first_tokens_s']:.3f} s, log-probs out by {figures['mean_abs_logprob_gap']:.2g} of the "
        f"trainer's, {figures['mean_abs_logprob_error']:.2g} of exact ones (trainer: "
        f"{figures['trainer_mean_abs_logprob_error']:.2g})"
        + (f", {memory:.1f} GiB" if memory is not None else "")
        + (f", {figures['num_updates']} updates" if figures["num_updates"] else "")
    )
