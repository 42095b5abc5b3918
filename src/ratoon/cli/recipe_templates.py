"""Commented recipes, made of a task and a machine."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from ratoon.types.extras import install_command

Machine = Literal["cpu", "gpu"]

REWARDS_FILE = "rewards.py"

REWARDS_SKELETON = '''\
"""The reward of this recipe: ratoon calls score() once for each response."""


def score(response: str, answer: str) -> float:
    """A number, larger for better responses; 0 to 1 is a good range.

    Parameters are found by name: `prompt`, `response`, `answer`, `metadata`, or any column of the data.
    """
    # Credit for each character in its place: a beginner needs something to climb. Watch that it cannot be had without
    # solving the task: the longer of the two divides, so a longer response gains nothing.
    right = sum(given == wanted for given, wanted in zip(response, answer))
    return right / max(len(response), len(answer), 1)
'''

ANSWERLESS_REWARDS_SKELETON = '''\
"""The reward of this recipe: ratoon calls score() once for each response."""


def score(prompt: str, response: str) -> float:
    """A number, larger for better responses; 0 to 1 is a good range.

    Parameters are found by name: `prompt`, `response`, `metadata`, or any column of the data.
    """
    # To be replaced by what a good response is. As it stands, short ones are.
    return 1 / (1 + len(response))
'''


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """What makes a task's recipe learn as it is written, on the tiny fresh model."""

    rows: tuple[Mapping[str, str], ...]
    """Of the example file; empty for a generator."""

    warm_start: str
    """Lines of `[sft]`."""

    max_response_tokens: int

    learned: str
    """Mean held-out reward before and after, and time, as measured on two CPU cores."""


_NUM_EXAMPLES = 400
_NUMBERS = tuple(1_000 + 6_367 * index % 9_000 for index in range(_NUM_EXAMPLES))
"""Distinct, of four digits, the last of which are evenly spread."""

_LAST_DIGITS = tuple({"prompt": f"What is the last digit of {n}?", "answer": str(n % 10)} for n in _NUMBERS)
_REPEATS = tuple({"prompt": f"Write the last digit of {n} three times.", "answer": 3 * str(n % 10)} for n in _NUMBERS)
_EQUATIONS = tuple(
    {
        "prompt": f"Solve for {letter}: {a}{letter} = {b}.",
        "answer": f"\\frac{{{b}}}{{{a}}}",
        "solution": f"\\boxed{{{b}/{a}}}",
    }
    for letter in "xyzabc"
    for a in range(2, 10)
    for b in range(1, 10)
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What is trained on, and how it is scored."""

    purpose: str
    """For `--list`."""

    source: str
    """`data.source` where the user names none: a file beside the recipe, or a generator."""

    data: str
    """Further lines of `[data]`, comments included."""

    reward: str
    """Lines of `[reward]`."""

    max_response_tokens: int
    example: Example
    writes_rewards: bool = False

    @property
    def example_text(self) -> str:
        """The example file: JSON, one object a line."""
        return "".join(json.dumps(dict(row)) + "\n" for row in self.example.rows)


_TRUNCATED = "score_truncated = false # a response that was cut scores 0; else never ending costs nothing"

TASKS: Mapping[str, Task] = MappingProxyType(
    {
        "math": Task(
            purpose="mathematics with an answer that can be verified: 1/2, 0.5 and \\frac{1}{2} are the same",
            source="math.jsonl",
            data='prompt_template = "{prompt} Put the final answer in \\\\boxed{}."',
            reward=(f'function = "math-verify" # needs: {install_command("math")}\nextract = "boxed"\n{_TRUNCATED}'),
            max_response_tokens=1024,
            example=Example(
                rows=_EQUATIONS,
                warm_start='demonstrations = "column:solution" # absent: the answers themselves\nnum_steps = 120',
                max_response_tokens=16,
                learned="held-out reward 0.56 before, 0.94 after 60 steps; 100 seconds on two CPU cores.",
            ),
        ),
        "qa": Task(
            purpose="questions with one right answer, compared as text",
            source="qa.jsonl",
            data='prompt_template = "{prompt} Give only the final answer."',
            reward=(
                'function = "exact-match"\n'
                'extract = "last-number" # what is compared: "text" (all of the response), "last-number", "answer-tag" '
                f'or "boxed"\n{_TRUNCATED}'
            ),
            max_response_tokens=256,
            example=Example(
                rows=_LAST_DIGITS,
                warm_start="num_steps = 60",
                max_response_tokens=8,
                learned="held-out reward 0.44 before, 0.80 after 60 steps; one minute on two CPU cores.",
            ),
        ),
        "own-reward": Task(
            purpose="your own reward function in Python, for your own data",
            source="data.jsonl",
            data="# Every other column of the data can be a parameter of the reward function.",
            reward=(
                f'function = "python:{REWARDS_FILE}:score" # a function in the file beside this recipe\n'
                f"timeout_s = 30.0 # a response that takes longer to score is a failure\n"
                'on_failure = "raise" # or "zero": it scores 0; "drop": it is not trained on\n'
                f"{_TRUNCATED}"
            ),
            max_response_tokens=256,
            example=Example(
                rows=_REPEATS,
                warm_start="num_steps = 40",
                max_response_tokens=8,
                learned="held-out reward 0.23 before, 0.91 after 60 steps; 45 seconds on two CPU cores.",
            ),
            writes_rewards=True,
        ),
        "reasoning-gym": Task(
            purpose="tasks that reasoning-gym generates and scores; no data needed",
            source="reasoning-gym:spell_backward",
            data=(
                "options = { min_word_len = 3, max_word_len = 4 } # of this generator\n"
                "size = 4000 # items to generate; duplicates among them are removed"
            ),
            reward=(
                'function = "reasoning-gym" # the task\'s own scorer, with partial credit for letters in place\n'
                f"# needs: {install_command('reasoning')}\n{_TRUNCATED}"
            ),
            max_response_tokens=64,
            example=Example(
                rows=(),
                warm_start="num_steps = 150",
                max_response_tokens=8,
                learned="held-out reward 0.33 before, 0.51 after 60 steps; 75 seconds on two CPU cores.",
            ),
        ),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelChoice:
    """The `[model]` table and what follows from the model."""

    table: str
    """With its header."""

    chat_template: bool
    dtype_note: str = ""


FRESH_MODEL = """\
# A tiny model with random weights, one token a character: it learns easy patterns, and nothing of the world.
# For a real model, write instead:
#   [model]
#   path = "path/to/folder"  # with config.json and *.safetensors; nothing is downloaded
#   dtype = "bfloat16"       # on a GPU
[model.fresh]
hidden_size = 128
num_layers = 2
max_positions = {positions}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """Everything that fills a template."""

    file: str
    """Its name, as a shell takes it."""

    name: str
    task: Task
    machine: Machine
    source: str
    columns: tuple[str, str] | None
    """Prompt and answer column of the user's own data."""

    is_example: bool
    """The task's own data on the fresh model: with its warm start, and the figures measured so."""

    num_heldout: int
    model: ModelChoice
    prompts_per_step: int
    group_size: int
    max_response_tokens: int
    max_rows_per_microbatch: int
    learning_rate: str
    num_steps: int


def recipe_text(choices: Choices) -> str:
    """The recipe as TOML with a comment on what each key means to its user."""
    task, template = choices.task, "true" if choices.model.chat_template else "false"
    sequences = choices.prompts_per_step * choices.group_size
    return f"""\
# {task.purpose[0].upper()}{task.purpose[1:]}.
#
#   ratoon plan {choices.file}     what it would do, and what memory it needs; loads no weights
#   ratoon train {choices.file}    trains; the same command again resumes
#
# Any key can be set on the command line: --trainer.num_steps 10. All keys: docs/recipes.md.
{_learned(choices)}
[run]
name = {json.dumps(choices.name)} # the run's folder: runs/{choices.name}

{choices.model.table.rstrip()}

[data]
source = {json.dumps(choices.source)}
{_columns(choices)}{task.data}
chat_template = {template} # wrap prompts as the model's chat template says; false: raw text
num_heldout = {choices.num_heldout} # prompts that are never trained on, for evaluation
{_warm_start(choices)}
# {choices.prompts_per_step} prompts x {choices.group_size} responses = {sequences} sequences a step.
[rollout]
prompts_per_step = {choices.prompts_per_step}
group_size = {choices.group_size} # responses to each prompt, compared with one another
max_response_tokens = {choices.max_response_tokens} # longer ones are cut
temperature = 1.0 # of sampling; training uses the same

[reward]
{task.reward}

[algorithm]
name = "grpo" # docs/recipes.md has the others

[planner]
max_rows_per_microbatch = {choices.max_rows_per_microbatch} # token slots of one forward pass; less if memory runs out

[trainer]
num_steps = {choices.num_steps}
learning_rate = {choices.learning_rate}
warmup_steps = 5
checkpoint_every_steps = 20 # what a killed run loses at most
device = {json.dumps("cuda" if choices.machine == "gpu" else "cpu")}

[evaluation]
every_steps = 20 # of the held-out prompts; also before the first step and after the last
"""


def _learned(choices: Choices) -> str:
    return f"#\n# As it stands: {choices.task.example.learned}\n" if choices.is_example else ""


def _columns(choices: Choices) -> str:
    if choices.columns is None:
        return ""
    prompt, answer = map(json.dumps, choices.columns)
    return f'prompt_column = {prompt}\nanswer_column = {answer} # "" for data without answers\n'


def _warm_start(choices: Choices) -> str:
    """Random weights answer nothing right, and a reward that is always 0 teaches nothing."""
    if not choices.is_example:
        return ""
    return f"""
# A short supervised start, which shows the form of an answer. A pretrained model can do without.
[sft]
{choices.task.example.warm_start}
learning_rate = 1e-3
"""
