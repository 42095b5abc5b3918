"""`ratoon plan`: what it says, what it leaves alone, and how it ends."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tests.loop.tiny_run import write_tiny_recipe
from transformers import PreTrainedModel

from ratoon.cli.main import main
from ratoon.loop.device_memory import DeviceMemory
from ratoon.models import build_fresh
from ratoon.models.config import FreshModelConfig

Plan = Callable[..., tuple[int, str, str]]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_tiny_recipe(tmp_path)
    return tmp_path


@pytest.fixture
def plan(folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Plan:
    """`ratoon plan` of the tiny recipe, where loading or making a model's weights is a failure: (status, out, err)."""

    def no_weights(*_: object, **__: object) -> None:
        raise AssertionError("weights were loaded")

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(PreTrainedModel, "from_pretrained", no_weights)
        monkeypatch.setattr("ratoon.models.fresh.Qwen3ForCausalLM", no_weights)
        capsys.readouterr()
        status = main(["plan", str(folder / "recipe.toml"), *arguments])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return call


def files_of(folder: Path) -> dict[str, tuple[int, int]]:
    return {str(path): (path.stat().st_mtime_ns, path.stat().st_size) for path in folder.rglob("*")}


def test_says_what_a_batch_is_and_writes_nothing(plan: Plan, folder: Path):
    """verl#1524, #180, #376, #3288, #2333: is the batch in prompts or sequences, global or not, before or after x n?"""
    before = files_of(folder)
    status, out, err = plan("--algorithm.num_minibatches=2", "--planner.max_rows_per_microbatch=40")
    assert status == 0, err
    assert "2 prompts x 4 responses = 8 sequences a step" in out
    assert "global: for all ranks together" in out
    assert "counts prompts, not sequences" in out
    assert "2 optimizer updates of 1 prompts each" in out
    assert "at most 40 rows (planner.max_rows_per_microbatch)" in out
    assert "not the loss" in out
    assert "runs/tiny: a new run" in out
    assert files_of(folder) == before


def test_shows_what_differs_or_everything(plan: Plan):
    _, short, _ = plan("--algorithm.name=dapo")
    assert 'algorithm.name = "dapo"' in short
    assert "algorithm.clip_high = 0.28" in short  # what the name set
    assert "model.fresh.hidden_size = 32" in short
    assert "rollout.temperature" not in short
    _, full, _ = plan("--full")
    assert "temperature = 1.0" in full
    assert "[planner]" in full


def test_numbers_of_the_tiny_recipe(plan: Plan):
    """Two prompts of 3 tokens with 4 responses each, of 3 or of 6 tokens."""
    _, out, _ = plan()
    cells = {line[:36].strip(): line[36:].split() for line in out.splitlines()}
    assert cells["rows a step"] == [str(2 * (3 + 4 * 3)), str(2 * (3 + 4 * 6))]
    assert cells["tokens of separate sequences"] == [str(2 * 4 * (3 + 3)), str(2 * 4 * (3 + 6))]
    assert cells["dedup ratio"] == ["1.60", "1.33"]
    assert cells["microbatches an update, each rank"] == ["1", "1"]
    assert "11 rows; 8 to train on, 3 held out" in out
    assert "forward flash-cpu, backward flash-cpu" in out
    assert "3 to 3" in out


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["--trainer.num_step=5"], ["trainer.num_step", "Did you mean num_steps"]),
        (["--rollout.max_response_tokens=100"], ["model.fresh.max_positions = 32"]),
        (["--planner.max_rows_per_microbatch=5"], ["planner.max_rows_per_microbatch = 5"]),
        (["--data.source=absent.jsonl"], ["absent.jsonl", "does not exist"]),
        (["--reward.function=python:absent.py:score"], ["absent.py"]),
        (["--model.attention=flex"], ['model.attention = "flex"']),
        (["--run.output_dir=/dev/null"], ["/dev/null/tiny", "run.output_dir"]),
    ],
)
def test_what_train_refuses_ends_in_one_paragraph_and_2(
    plan: Plan, folder: Path, overrides: list[str], words: list[str]
):
    before = files_of(folder)
    status, _, err = plan(*overrides)
    assert status == 2
    assert err.startswith("ratoon plan: ")
    assert err.count("\n") == 1
    for word in words:
        assert word in err
    assert files_of(folder) == before


SERVER = ("--rollout.engine=vllm-server", "--rollout.server={command=['vllm']}")


@pytest.mark.parametrize(
    ("key", "others"),
    [
        ("reward.timeout_s", ()),
        ("reward.start_timeout_s", ()),
        ("rollout.timeout_s", ()),
        ("rollout.server.ready_timeout_s", SERVER),
    ],
)
def test_limits_that_outlast_the_patience_of_the_other_ranks_are_refused(plan: Plan, key: str, others: tuple[str, ...]):
    """Ranks would end the run while one of them is busy within its own limit. One process waits for nobody."""
    assert key not in plan(*others, "--trainer.rank_timeout_s=901", "--gpus=2")[2]
    as_long = (*others, "--trainer.rank_timeout_s=1000", f"--{key}=1000")
    status, _, err = plan(*as_long, "--gpus=2")
    assert status == 2
    assert f"{key} = 1000 " in err and "trainer.rank_timeout_s = 1000" in err and "2 processes" in err
    assert key not in plan(*as_long, "--gpus=1")[2]


@pytest.mark.skipif(torch.cuda.is_available(), reason="a machine with a GPU can run it")
def test_recipe_of_another_machine_is_planned_all_the_same(plan: Plan):
    status, out, _ = plan("--trainer.device=cuda", "--model.dtype=bfloat16")
    assert status == 0
    assert "this machine cannot run it" in out
    assert "float32 masters" in out
    assert "depends on the GPU" in out


@pytest.mark.skipif(torch.cuda.is_available(), reason="a machine with a GPU can run it")
@pytest.mark.parametrize(
    "planned", [("--trainer.device=cuda",), ("--trainer.device=auto", "--gpus=2", "--gpu-memory-gib=80")]
)
def test_what_runs_on_gpus_only_is_planned_for_those_of_another_machine(plan: Plan, planned: tuple[str, ...]):
    """That this machine has none is a warning; what would be refused there too still is."""
    for key in ("--model.batch_invariant=true", "--model.attention=flex"):
        status, out, err = plan(*planned, key)
        assert (status, err) == (0, "")
        assert "this machine cannot run it" in out
    status, _, err = plan(*planned, "--model.batch_invariant=true", "--rollout.top_p=0.9")
    assert status == 2 and "rollout.top_p" in err


def test_a_batch_invariant_model_has_its_own_attention(plan: Plan, monkeypatch: pytest.MonkeyPatch):
    """And not the one that `auto` takes of others."""
    asked: list[str] = []

    def note(_: object, name: str) -> SimpleNamespace:
        asked.append(name)
        return SimpleNamespace(kernels="kernels", reason="reason")

    monkeypatch.setattr("ratoon.loop.dry_run.resolve_impl", note)
    monkeypatch.setattr("ratoon.loop.dry_run._device", lambda *_, **__: ("cuda", True))
    plan("--trainer.device=cuda", "--model.batch_invariant=true", "--gpu-memory-gib=80")
    assert asked == ["invariant"]


def test_memory_and_disk_that_do_not_suffice(plan: Plan, monkeypatch: pytest.MonkeyPatch):
    """With "auto" train refuses; a mode that the recipe insists on is warned of. A full disk is refused too."""
    small = DeviceMemory.of_total("cpu", 1000)
    with monkeypatch.context() as little_memory:
        little_memory.setattr(DeviceMemory, "here", lambda _: small)
        status, out, err = plan()
        assert status == 2
        assert "does not fit" in out
        assert "one step needs" in err
        status, out, _ = plan("--model.recompute=selective")
        assert status == 0
        assert "warning: memory:" in out
    usage = SimpleNamespace(total=1, used=1, free=1000)
    monkeypatch.setattr("ratoon.loop.run_state.shutil.disk_usage", lambda _: usage)
    status, out, err = plan()
    assert status == 2
    assert "Free some space" in err
    assert "checkpoints stand side by side" in out


def test_memory_of_each_mode_and_of_ranks_that_share_the_model(plan: Plan):
    _, out, _ = plan("--model.dtype=bfloat16")
    assert "highest with recompute none" in out
    assert re.search(r"recompute none .* fits, taken", out)
    assert re.search(r"recompute full .* fits\n", out)
    assert "this run has 1 rank" in out
    _, shared, _ = plan("--model.dtype=bfloat16", "--gpus=4")
    assert "this run has 4 ranks" in shared
    assert "estimated, of each rank" in shared
    assert "weights gathered for a layer" in shared
    _, whole, _ = plan("--model.dtype=bfloat16", "--gpus=4", "--trainer.sharding=none")
    assert "this run has 4 ranks" in whole
    assert "gathered" not in whole
    assert "this run has 2 ranks" in plan("--trainer.num_processes=2")[1]
    for wrong in ("0", "65537", "1" + "0" * 30):
        with pytest.raises(SystemExit):
            plan(f"--gpus={wrong}")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ((), ["engine transformers", "on its own weights", "8 responses at a time"]),
        (
            ("--rollout.engine=paged", "--rollout.cache_tokens=200"),
            ["engine paged", "192 tokens", "as rollout.cache_tokens says"],
        ),
        (("--trainer.num_processes=2",), ["on a whole copy of its weights", "key/value cache on each rank"]),
        (
            ("--rollout.engine=vllm", "--rollout.vllm.cache_gib=3", "--trainer.device=cuda", "--gpu-memory-gib=100"),
            ["engine vllm", "takes 40% of each GPU, 40.0 GiB", "kept during updates", "cache: 3.0 GiB"],
        ),
        (
            ("--rollout.engine=vllm", "--rollout.vllm.sleep=2", "--trainer.device=cuda"),
            ["takes 40% of each GPU (", "given to the trainer during updates", "what its weights leave"],
        ),
        (("--rollout.engine=vllm",), ["key/value cache: 1.0 GiB (rollout.vllm.cache_gib)"]),
        (SERVER, ["engine vllm-server: a server that each rank starts", "in none of the figures here"]),
        (
            ("--rollout.engine=sglang-server", "--rollout.server={url='http://127.0.0.1:9'}"),
            ["engine sglang-server: a server at http://127.0.0.1:9"],
        ),
        (
            ("--rollout.max_new_tokens_per_step=4",),
            ["at most 4 tokens of a response a step", "one of 6 takes 2 steps", "fewer than 6 groups are held"],
        ),
    ],
)
def test_which_engine_draws_what_it_holds_and_in_how_many_steps(
    plan: Plan, settings: tuple[str, ...], words: list[str]
):
    """Whether or not the engine is installed here."""
    _, out, _ = plan(*settings)
    said = out.partition("\nRollout\n")[2].partition("\nModel\n")[0]
    for word in words:
        assert word in said
    assert ("partial rollouts" in said) == any("max_new_tokens_per_step" in setting for setting in settings)


def test_the_cache_that_is_told_of_is_the_one_that_the_estimate_counts(plan: Plan):
    _, out, _ = plan("--rollout.engine=paged")
    told = re.search(r"key/value cache: ([\d,]+) tokens, ([\d.]+ MiB)", out)
    assert told is not None
    assert re.search(rf"key/value cache of the rollout +{re.escape(told[2])}\n", out)
    # One layer; keys and values of one head of 16 channels in float32.
    assert float(told[2].split()[0]) == pytest.approx(int(told[1].replace(",", "")) * 2 * 16 * 4 / 2**20, abs=0.05)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a machine with a GPU holds figures against it")
def test_plans_for_gpus_say_whose_memory_they_are_held_against(plan: Plan):
    """Not this machine's, which has none."""
    anywhere = ("--trainer.device=auto", "--gpus=8")
    status, out, _ = plan(*anywhere)
    assert status == 0
    assert "on cuda" in out and "This machine has no GPU, so nothing says what fits; --gpu-memory-gib" in out
    assert "An estimate may fill" not in out and "fits, taken" not in out
    status, out, _ = plan(*anywhere, "--gpu-memory-gib=80")
    assert status == 0
    assert "fits, taken" in out and "of 80.0 GiB, a GPU's as given (--gpu-memory-gib)" in out
    assert "on cuda" in plan("--trainer.device=auto", "--gpu-memory-gib=80")[1]
    status, out, err = plan(*anywhere, "--gpu-memory-gib=1.0")
    assert status == 2
    assert "does not fit" in out and "of this GPU's 1.0 may be filled" in err


def test_plans_for_this_machine_say_so(plan: Plan):
    """Processes on a CPU share what it has."""
    alone, together = plan()[1], plan("--trainer.num_processes=2")[1]
    assert re.search(r"An estimate may fill .*, this machine's: ", alone)
    assert "one process's share of this machine's" in together and "2 processes share the machine's memory" in together
    totals = [re.search(r"may fill [\d.]+ \w+ of ([\d.]+) GiB", page) for page in (alone, together)]
    whole, half = (float(found[1]) for found in totals if found is not None)
    assert half == pytest.approx(whole / 2, abs=0.1)


@pytest.mark.parametrize("wrong", ["0", "-1", "nan", "inf", "much", "1e9"])
def test_gpu_memory_is_a_number_of_gib(plan: Plan, wrong: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        plan(f"--gpu-memory-gib={wrong}")
    assert "must be a number of GiB, above 0 and up to 65,536" in capsys.readouterr().err


def test_gpu_memory_of_a_cpu_is_refused(plan: Plan):
    status, _, err = plan("--gpu-memory-gib=80")
    assert status == 2
    assert 'trainer.device = "cpu"' in err


def test_ranks_that_hold_microbatches_together(plan: Plan):
    """The mesh, fewer rows for each rank, and a refusal that says which degrees there are."""
    gpus = ("--gpus=4", "--rollout.group_size=400", "--model.recompute=none")
    _, apart, _ = plan(*gpus)
    status, together, _ = plan(*gpus, "--trainer.sequence_parallel=2")
    assert status == 0
    assert "this run has 4 processes: 2 data ranks x 2 sequence ranks" in together
    assert "Each data rank computes" in together and "Each rank computes" in apart
    assert "are scored, shared out over 2 ranks:" in together
    halved, whole = (_mib(page, "activations of the largest microbatch") for page in (together, apart))
    assert 0.5 <= halved / whole < 0.6
    status, _, err = plan("--trainer.sequence_parallel=2")
    assert status == 2
    assert "this run has one; start more" in err
    status, _, err = plan(*gpus, "--trainer.sequence_parallel=3")
    assert status == 2
    assert "trainer.sequence_parallel = 3 does not divide the 4 processes" in err


def _mib(page: str, name: str) -> float:
    found = re.search(rf"{name}\s+([\d.]+) MiB", page)
    assert found is not None, page
    return float(found[1])


def test_run_folder_that_train_would_resume_or_refuse(plan: Plan, folder: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["train", str(folder / "recipe.toml"), "--trainer.num_steps=1"]) == 0
    before = files_of(folder / "runs")
    assert "would resume after step 1 of 6" in plan()[1]
    assert "complete (1 step)" in plan("--trainer.num_steps=1")[1]
    status, out, err = plan("--trainer.learning_rate=1e-4")
    assert status == 2
    assert "dedup ratio" in out  # the plan is shown all the same
    assert "changed: trainer.learning_rate" in err
    assert err.count("\n") == 1
    assert files_of(folder / "runs") == before
    # More than one thing to mend: each is a sentence of the one paragraph.
    err = plan("--trainer.learning_rate=1e-4", "--rollout.engine=vllm-server")[2]
    assert "(the old run is set aside). Also: " in err and "rollout.server" in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("--run.name=" + 300 * "a", "up to 200 letters"),
        ("--run.output_dir=new/" + 300 * "a", "a part of more than 255 bytes"),
        ("--run.output_dir=" + 2500 * "a/", "cannot be written (File name too long: "),
    ],
    ids=["name", "part", "path"],
)
def test_run_folder_of_a_name_that_no_folder_can_have_is_refused(plan: Plan, override: str, words: str):
    status, _, err = plan(override)
    assert status == 2
    assert words in err
    assert err.count("\n") == 1


def test_model_folder_is_planned_without_its_weights(plan: Plan, folder: Path):
    """Weights that hold nonsense are not noticed: only headers are read."""
    model, tokenizer = build_fresh(FreshModelConfig(hidden_size=32, num_layers=1, tied_embeddings=False), seed=0)
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    weights = folder / "model" / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[: len(content) // 2] + b"\xff" * (len(content) - len(content) // 2))
    text = (folder / "recipe.toml").read_text()
    start, end = text.index("[model.fresh]"), text.index("[data]")
    (folder / "recipe.toml").write_text(f"{text[:start]}[model]\npath = {str(folder / 'model')!r}\n{text[end:]}")
    status, out, err = plan("--rollout.max_response_tokens=2000")
    assert status == 0, err
    assert f"{sum(parameter.numel() for parameter in model.parameters()) / 1e3:.3g} k parameters" in out
    assert "1,024 positions" in out
    assert "beyond them it is untrained" in out
    shutil.rmtree(folder / "model")
    assert plan()[0] == 2


def test_several_sources_and_odd_values_are_shown_as_toml(folder: Path, plan: Plan):
    rows = "".join(json.dumps({"prompt": word, "answer": "a"}) + "\n" for word in ("abc", "bcd", "cde"))
    (folder / "more.jsonl").write_text(rows)
    text = (folder / "recipe.toml").read_text().replace('source = "words.jsonl"\n', "")
    tables = '[[data.sources]]\nsource = "words.jsonl"\n[[data.sources]]\nsource = "more.jsonl"\n'
    (folder / "recipe.toml").write_text(text.replace("[sft]", f"{tables}[sft]"))
    status, out, err = plan("--trainer.max_grad_norm=inf", "--rollout.stop=['h']")
    assert status == 0, err
    assert 'data.sources = [{ source = "words.jsonl" }, { source = "more.jsonl" }]' in out
    assert "trainer.max_grad_norm = inf" in out
    assert 'rollout.stop = ["h"]' in out
