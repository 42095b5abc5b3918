"""Commented recipes, made of a task and a machine."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

Machine = Literal["cpu", "gpu"]

REWARDS_FILE = "rewards.py"

REWARDS_SKELETON = '''\
"""The reward of this recipe: ratoon calls score() once for each response."""


def score(response: str, answer: str) -> float:
    """A number, larger for better responses; 0 to 1 is a good range.

    Parameters are found by name: `prompt`, `response`, `answer`, `metadata`, or any column of the data.
    """
    if response.strip() == answer.strip():
        return 1.0
    # Partial credit gives a beginner something to climb. Watch that it cannot be had without solving the task.
    return 0.1 if answer.strip() in response else 0.0
'''


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
    examples: tuple[Mapping[str, Any], ...] = ()
    """Rows of the example file; empty for a generator."""

    writes_rewards: bool = False

    @property
    def example_text(self) -> str:
        """The example file: JSON, one object a line."""
        return "".join(json.dumps(dict(row)) + "\n" for row in self.examples)


_SUMS = tuple({"prompt": f"What is {a} + {b}?", "answer": str(a + b)} for a in range(3, 8) for b in (4, 9, 15))
_REVERSALS = tuple(
    {"prompt": f"Spell {word} backwards.", "answer": word[::-1]}
    for word in (
        "river",
        "stone",
        "cloud",
        "apple",
        "grass",
        "music",
        "night",
        "paper",
        "table",
        "water",
        "house",
        "light",
    )
)
_ALGEBRA = tuple(
    {"prompt": f"Solve for x: {a}x = {b}. Give x as a fraction or a whole number.", "answer": f"\\frac{{{b}}}{{{a}}}"}
    for a in (2, 3, 5, 7)
    for b in (1, 4, 9)
)

_TRUNCATED = "score_truncated = false # a response that was cut scores 0; else never ending costs nothing"

TASKS: Mapping[str, Task] = MappingProxyType(
    {
        "math": Task(
            purpose="mathematics with an answer that can be verified: 1/2, 0.5 and \\frac{1}{2} are the same",
            source="math.jsonl",
            data='prompt_template = "{prompt} Put the final answer in \\\\boxed{}."',
            reward=f'function = "math-verify" # needs: pip install "ratoon[math]"\nextract = "boxed"\n{_TRUNCATED}',
            max_response_tokens=1024,
            examples=_ALGEBRA,
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
            examples=_SUMS,
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
            examples=_REVERSALS,
            writes_rewards=True,
        ),
        "reasoning-gym": Task(
            purpose="tasks that reasoning-gym generates and scores; no data needed",
            source="reasoning-gym:chain_sum",
            data=(
                "options = { min_terms = 2, max_terms = 3, min_digits = 1, max_digits = 2 } # of this generator\n"
                "size = 4000 # items to generate; duplicates among them are removed\n"
                'prompt_template = "{prompt} Give only the final answer."'
            ),
            reward=(
                'function = "reasoning-gym" # the task\'s own scorer; needs: pip install "ratoon[reasoning]"\n'
                f'extract = "last-number"\n{_TRUNCATED}'
            ),
            max_response_tokens=64,
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
# A tiny model with random weights, one token a character: it shows that everything runs, and learns little.
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

[run]
name = {json.dumps(choices.name)} # the run's folder: runs/{choices.name}

{choices.model.table.rstrip()}

[data]
source = {json.dumps(choices.source)}
{task.data}
chat_template = {template} # wrap prompts as the model's chat template says; false: raw text
num_heldout = {choices.num_heldout} # prompts that are never trained on, for evaluation

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
