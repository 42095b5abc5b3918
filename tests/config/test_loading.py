"""A wrong recipe names file, key, value and what is allowed, and never shows a traceback."""

from pathlib import Path
from typing import Literal, get_args, get_origin

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.docs.recipe_tables import sections

from ratoon.config.loading import changed_keys, dump_recipe, load_recipe, parse_overrides
from ratoon.config.peer_names import OUR_KEYS, PEER_NAMES
from ratoon.types.errors import UserError

GOOD = """
[run]
name = "r"
[model]
fresh = { hidden_size = 32 }
[data]
source = "reasoning-gym:chain_sum"
size = 10
[reward]
function = "reasoning-gym"
[trainer]
num_steps = 3
betas = [0.9, 0.99]
"""


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "recipe.toml"
    path.write_text(text)
    return path


def test_good_recipe_loads_and_survives_its_own_dump(tmp_path: Path):
    recipe = load_recipe(write(tmp_path, GOOD))
    assert recipe.trainer.num_steps == 3
    assert recipe.trainer.betas == (0.9, 0.99)
    again = load_recipe(write(tmp_path, dump_recipe(recipe)))
    assert again == recipe
    assert changed_keys(recipe, again) == ()


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["--trainer.num_steps", "7"], 7),
        (["--trainer.num_steps=8"], 8),
        (["--trainer.num_steps=8", "--trainer.num_steps", "9"], 9),
    ],
)
def test_overrides_in_both_spellings(tmp_path: Path, overrides: list[str], expected: int):
    assert load_recipe(write(tmp_path, GOOD), overrides).trainer.num_steps == expected


def test_override_values_are_toml_or_strings():
    arguments = ["--a.b=1", "--c", "x y", "--d=[1, 2]", "--e=true", "--f=-0.5", "--g.h=runs/x", "--i", "-3", "--j="]
    assert parse_overrides(arguments) == [
        ("a.b", 1),
        ("c", "x y"),
        ("d", [1, 2]),
        ("e", True),
        ("f", -0.5),
        ("g.h", "runs/x"),
        ("i", -3),
        ("j", ""),
    ]


def test_changed_keys_names_what_differs(tmp_path: Path):
    path = write(tmp_path, GOOD)
    assert changed_keys(load_recipe(path), load_recipe(path, ["--trainer.num_steps=4", "--run.seed=1"])) == (
        "run.seed",
        "trainer.num_steps",
    )


def test_a_choice_that_there_is_not_names_the_choices_once(tmp_path: Path):
    with pytest.raises(
        UserError, match=r"algorithm\.name = 'ppo': there is no such choice\. Allowed: 'grpo', "
    ) as raised:
        load_recipe(write(tmp_path, GOOD), ["--algorithm.name=ppo"])
    assert str(raised.value).count("'dr-grpo'") == 1


def test_every_key_of_choices_says_that_there_is_no_such_choice(tmp_path: Path):
    """A union of choices would be answered in pydantic's words, once for each of its members."""
    chosen = [
        f"{section}.{name}"
        for section, model in sections().items()
        for name, field in model.model_fields.items()
        if get_origin(field.annotation) is Literal
    ]
    assert {"rollout.engine", "model.dtype", "trainer.device"} <= set(chosen)
    for key in chosen:
        with pytest.raises(UserError) as raised:
            load_recipe(write(tmp_path, GOOD), [f"--{key}=nonsense"])
        assert f"{key} = 'nonsense': there is no such choice. Allowed: " in str(raised.value)
        assert "input should be" not in str(raised.value)


def test_each_name_of_another_library_leads_to_one_key_of_ours():
    keys = {f"{section}.{name}" for section, model in sections().items() for name in model.model_fields}
    names = [name for row in PEER_NAMES for name in {*row.trl, *row.verl, *row.openrlhf}]
    assert {row.ours for row in PEER_NAMES} <= keys
    assert len(names) == len(set(names)) == len(OUR_KEYS)


@pytest.mark.parametrize(
    ("text", "overrides", "words"),
    [
        (GOOD + "num_stepz = 4\n", [], ["trainer.num_stepz = 4", "Did you mean num_steps", "learning_rate"]),
        (GOOD + "[trainre]\n", [], ["trainre", "Did you mean trainer", "rollout"]),
        (GOOD, ["--trainer.num_steps=ten"], ["trainer.num_steps = 'ten'", "whole number"]),
        (GOOD, ["--trainer.num_steps=true"], ["trainer.num_steps = True", "whole number"]),
        (GOOD, ["--trainer.num_steps=1.5"], ["trainer.num_steps = 1.5", "whole number"]),
        (GOOD, ["--trainer.num_steps=-1"], ["trainer.num_steps = -1", "a whole number at least 0"]),
        (
            GOOD,
            ["--trainer.learning_rate=fast"],
            ["trainer.learning_rate = 'fast'", "Allowed: a number above 0 and at most 1000000."],
        ),
        (GOOD, ["--learning_rate=1e-4"], ["learning_rate = 0.0001", "Did you mean sft.learning_rate"]),
        (GOOD, ["--trainer.group_size=4"], ["trainer.group_size = 4", "Did you mean rollout.group_size"]),
        (GOOD, ["--trainer.lr=1e-4"], ["trainer.lr = 0.0001", "Did you mean learning_rate?"]),
        (GOOD, ["--num_generations=4"], ["num_generations = 4", "Did you mean rollout.group_size?"]),
        (GOOD, ["--rollout.n=4"], ["rollout.n = 4", "Did you mean group_size?"]),
        (GOOD, ["--trainer.beta=0.1"], ["trainer.beta = 0.1", "Did you mean algorithm.kl_coefficient?"]),
        (GOOD, ["--algorithm.kl_coef=0.1"], ["algorithm.kl_coef = 0.1", "Did you mean kl_coefficient?"]),
        (GOOD, ["--rollout.beam_width=4"], ["rollout.beam_width = 4 is not a key of [rollout]. Allowed: "]),
        (GOOD, ["--model.path=x"], ["[model] give exactly one of"]),
        (GOOD, ["--trainer.schedule=cosin"], ["trainer.schedule = 'cosin'", "'constant', 'linear', 'cosine'"]),
        (GOOD, ["--trainer=3"], ["trainer = 3", "a table with num_steps"]),
        (GOOD, ["--trainer.num_steps.x=3"], ["trainer.num_steps", "not a section"]),
        (GOOD, ["--model.fresh.hidden=3"], ["model.fresh.hidden = 3", "hidden_size"]),
        (GOOD, ["--trainer.num_steps"], ["--trainer.num_steps", "no value"]),
        (GOOD, ["num_steps=3"], ["'num_steps=3'", "--section.key=value"]),
        (GOOD, ["--rollout.group_size=1"], ["rollout.group_size is 1", "set it to 2 or more"]),
        (GOOD, ["--run.name=a/b"], ["run.name = 'a/b'", "letters, digits"]),
        (GOOD, ["--algorithm.num_minibatches=99"], ["num_minibatches is 99", "prompts_per_step"]),
        (GOOD, ["--trainer.betas=[0.9, 1.0]"], ["trainer.betas = [0.9, 1.0]: each must be at least 0 and below 1"]),
        (GOOD, ["--trainer.betas=[nan, 0.9]"], ["trainer.betas = [nan, 0.9]: each"]),
        (GOOD, ["--trainer.betas=[-1, 0.9]"], ["trainer.betas = ", "each must be"]),
        (GOOD, ["--reward.timeout_s=1e10"], ["reward.timeout_s = 10000000000.0", "at most 604800"]),
        (GOOD, ["--reward.timeout_s=nan"], ["reward.timeout_s = nan", "finite", "at most 604800"]),
        (GOOD, ["--rollout.timeout_s=inf"], ["rollout.timeout_s = inf", "at most 604800"]),
        (GOOD, ["--rollout.temperature=1e-39"], ["rollout.temperature = 1e-39", "at least 1e-06"]),
        (GOOD, ["--rollout.temperature=nan"], ["rollout.temperature = nan", "at least 1e-06"]),
        (GOOD, ["--evaluation.temperature=1e-39"], ["evaluation.temperature = 1e-39: must be 0 (greedy) or at least"]),
        (GOOD, ["--evaluation.temperature=nan"], ["evaluation.temperature = nan", "at most"]),
        (GOOD, ["--run.seed=" + "9" * 30], ["run.seed is a whole number of more than 64 bits"]),
        (GOOD, ["--run.seed=" + "9" * 5000], ["run.seed = '9999", "a whole number at least 0"]),
        (GOOD, ["--run.seed=0x" + "f" * 5000], ["run.seed is a whole number of more than 64 bits"]),
        (GOOD, ["--data.options.x=[{y = 0x" + "f" * 5000 + "}]"], ["data.options.x.y is a whole number of more"]),
        ("x = " + "9" * 5000, [], ["a number of thousands of digits"]),
        (GOOD.replace('name = "r"', ""), [], ["run.name is missing"]),
        ("[run\n", [], ["not valid TOML", "line 1"]),
        ("x = 1\nx = 2\n", [], ["not valid TOML"]),
        ("", [], ["run is missing", "model is missing", "data is missing"]),
    ],
)
def test_wrong_recipe_is_one_paragraph(tmp_path: Path, text: str, overrides: list[str], words: list[str]):
    path = write(tmp_path, text)
    with pytest.raises(UserError) as raised:
        load_recipe(path, overrides)
    message = str(raised.value)
    assert "\n" not in message.strip()
    for word in words:
        assert word in message
    if not any(override == "num_steps=3" or "." not in override for override in overrides) and "section" not in message:
        assert str(path) in message or "override" in message


def test_missing_folder_and_binary_files_are_named(tmp_path: Path):
    with pytest.raises(UserError, match="no such recipe file"):
        load_recipe(tmp_path / "absent.toml")
    with pytest.raises(UserError, match="is a folder"):
        load_recipe(tmp_path)
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="not UTF-8"):
        load_recipe(binary)


def test_strings_need_no_quotes_on_the_command_line(tmp_path: Path):
    path = write(tmp_path, GOOD)
    for text, wanted in [("2026", "2026"), ("true", "true"), ("1e3", "1e3"), ('"2026"', "2026"), ("plain", "plain")]:
        assert load_recipe(path, [f"--run.name={text}"]).run.name == wanted
    with pytest.raises(UserError, match="whole number"):
        load_recipe(path, ["--run.seed=x"])


def test_override_with_a_line_break_sets_no_other_key(tmp_path: Path):
    assert parse_overrides(["--a.b=1\nc = 2"]) == [("a.b", "1\nc = 2")]


@pytest.mark.parametrize("key", ["run..name", ".name", "run.", "run.name.x", ".", ".."])
def test_odd_keys_are_user_errors(tmp_path: Path, key: str):
    with pytest.raises(UserError):
        load_recipe(write(tmp_path, GOOD), [f"--{key}=1"])


def test_byte_order_mark_is_no_error(tmp_path: Path):
    path = tmp_path / "marked.toml"
    path.write_bytes(b"\xef\xbb\xbf" + GOOD.replace("\n", "\r\n").encode())
    assert load_recipe(path).trainer.num_steps == 3


def test_deep_nesting_is_a_user_error(tmp_path: Path):
    with pytest.raises(UserError, match="nested too deeply"):
        load_recipe(write(tmp_path, "x = " + "[" * 100_000))
    assert parse_overrides(["--a=" + "[" * 100_000])[0][1].startswith("[[")


SPECIAL = st.sampled_from(
    ['"', "'", "\\", "\n", "\t", "\x00", "é", "🌱", "#", "=", "[", "]", "{", "}", "\r", " ", "\u2028"]
)


@given(
    prompt_template=st.text(SPECIAL, max_size=8),
    stop=st.lists(st.text(SPECIAL, min_size=1, max_size=3), max_size=3),
    options=st.dictionaries(
        st.text(min_size=1, max_size=4).filter(lambda key: key not in ("size", "seed")),
        st.one_of(st.integers(-9, 9), st.floats(allow_nan=False), st.booleans(), st.text(SPECIAL, max_size=3)),
        max_size=3,
    ),
    norm=st.sampled_from([1.0, float("inf"), 1e-300]),
)
def test_any_recipe_survives_its_own_dump(
    tmp_path_factory: pytest.TempPathFactory,
    prompt_template: str, stop: list[str], options: dict[str, object], norm: float,
):  # fmt: skip
    """A run folder's recipe is read again by every resume: what differs there would refuse the same command."""
    folder = tmp_path_factory.mktemp("dump")
    plain = load_recipe(write(folder, GOOD))
    recipe = plain.model_copy(
        update={
            "data": plain.data.model_copy(update={"prompt_template": "{prompt}" + prompt_template, "options": options}),
            "rollout": plain.rollout.model_copy(update={"stop": tuple(stop)}),
            "trainer": plain.trainer.model_copy(update={"max_grad_norm": norm}),
        }
    )
    (folder / "dumped.toml").write_text(dump_recipe(recipe), encoding="utf-8")
    assert changed_keys(recipe, load_recipe(folder / "dumped.toml")) == ()


@pytest.mark.parametrize("path", sorted((Path(__file__).parents[2] / "recipes").glob("*.toml")), ids=lambda p: p.name)
def test_recipes_of_the_repository_load(path: Path):
    assert load_recipe(path).run.name == path.stem


def test_a_null_character_is_refused_wherever_a_string_is_a_name_or_a_path(tmp_path: Path):
    texts = {"alphabet", "options", "pattern", "prompt_template", "stop", "system_prompt"}
    path = write(tmp_path, GOOD)
    for section, model in sections().items():
        for name, field in model.model_fields.items():
            if str not in (field.annotation, *get_args(field.annotation)) or name in texts:
                continue
            with pytest.raises(UserError, match=rf"{section}\.{name} = 'a\\x00b' holds a null character"):
                load_recipe(path, [f'--{section}.{name}="a\\u0000b"'])
    with pytest.raises(UserError, match=r"rollout\.server\.command = 'a\\x00b' holds a null character"):
        load_recipe(path, ['--rollout.server.command=["x", "a\\u0000b"]'])
    assert load_recipe(path, ['--rollout.stop=["\\u0000"]']).rollout.stop == ("\0",)


def test_bytes_of_the_command_line_that_are_no_text_are_refused(tmp_path: Path):
    with pytest.raises(UserError, match=r"run\.output_dir = '\\udcff' is not UTF-8 text"):
        load_recipe(write(tmp_path, GOOD), ["--run.output_dir=\udcff"])


def test_no_time_is_longer_than_clocks_and_sockets_can_count(tmp_path: Path):
    """poll() counts milliseconds in 31 bits, timedelta 10**9 days."""
    path = write(tmp_path, GOOD)
    times = [f"{section}.{name}" for section, model in sections().items() for name in model.model_fields]
    times = [key for key in times if key.endswith("_s")]
    assert "trainer.rank_timeout_s" in times
    for key in times:
        for value in ("2147484", "1e308", "inf", "nan"):
            with pytest.raises(UserError, match=key):
                load_recipe(path, [f"--{key}={value}"])
