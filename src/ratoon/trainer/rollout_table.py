"""Every response of a step as one Parquet file."""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from ratoon.trainer.durable_files import replace_file
from ratoon.types import Prompt, Response, RolloutGroup

ROLLOUT_SCHEMA = pa.schema(
    [
        pa.field("step", pa.int64(), nullable=False),
        pa.field("group_index", pa.int32(), nullable=False),
        pa.field("response_index", pa.int32(), nullable=False),
        pa.field("prompt_id", pa.string(), nullable=False),
        pa.field("prompt", pa.string(), nullable=False),
        pa.field("answer", pa.string()),
        pa.field("response", pa.string(), nullable=False),
        pa.field("reward", pa.float64()),
        pa.field("score_failed", pa.bool_()),
        pa.field("advantage", pa.float64()),
        pa.field("finish_reason", pa.string(), nullable=False),
        pa.field("num_prompt_tokens", pa.int32(), nullable=False),
        pa.field("num_response_tokens", pa.int32(), nullable=False),
        pa.field("token_ids", pa.list_(pa.int32()), nullable=False),
        pa.field("rollout_logprobs", pa.list_(pa.float32())),
        pa.field("policy_version", pa.int64()),
        pa.field("policy_versions", pa.list_(pa.int64())),
    ]
)
"""One row a response; where rewards have several components, with a column `reward_NAME` for each of them behind these.
`token_ids` are the response's own; `rollout_logprobs` and `policy_versions` stand beside them, or are null where the
engine reported none. `policy_version` is the oldest of them. `reward`, `score_failed` and `advantage` are null until
known."""


def rollout_file(folder: Path, step: int) -> Path:
    """`folder/step-000001.parquet` for step 1."""
    return folder / f"step-{step:06d}.parquet"


def rollout_step(path: Path) -> int | None:
    """The step in the name of a file that `rollout_file` named; None for any other name, such as the user's own."""
    match = re.fullmatch(r"step-([0-9]{6,18})\.parquet", path.name)
    return int(match[1]) if match else None


def write_rollouts(folder: Path, step: int, groups: Sequence[RolloutGroup]) -> Path:
    """Writes the responses of one step, whole or not at all; an earlier file of this step is replaced.

    step: as in metrics.jsonl: steps done once these responses are trained on. Returns the file's path.
    """
    folder.mkdir(parents=True, exist_ok=True)
    names = list(dict.fromkeys(name for group in groups for name in group.reward_components))
    components = {f"reward_{name}": name for name in names} if len(names) > 1 else {}
    rows = [row for index, group in enumerate(groups) for row in _rows(step, index, group, components)]
    schema = pa.schema([*ROLLOUT_SCHEMA, *(pa.field(column, pa.float64()) for column in components)])
    table = pa.Table.from_pylist(rows, schema=schema)
    path = rollout_file(folder, step)
    replace_file(path, lambda partial: pq.write_table(table, partial, compression="zstd"))
    return path


def _rows(step: int, group_index: int, group: RolloutGroup, components: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    """components: by column, the reward component that stands in it."""
    scores = {column: group.reward_components.get(name) for column, name in components.items()}
    for response_index, response in enumerate(group.responses):
        yield {
            "step": step,
            "group_index": group_index,
            "response_index": response_index,
            "reward": None if group.rewards_N is None else group.rewards_N[response_index],
            "score_failed": None if group.score_failed_N is None else group.score_failed_N[response_index],
            **{column: None if score_N is None else score_N[response_index] for column, score_N in scores.items()},
            "advantage": None if group.advantages_N is None else group.advantages_N[response_index],
            **_prompt_columns(group.prompt),
            **_response_columns(response),
        }


def _prompt_columns(prompt: Prompt) -> dict[str, Any]:
    return {
        "prompt_id": _storable(str(prompt.id)),
        "prompt": _storable(prompt.text),
        "answer": None if prompt.answer is None else _storable(prompt.answer),
        "num_prompt_tokens": prompt.num_tokens,
    }


def _response_columns(response: Response) -> dict[str, Any]:
    versions = response.policy_versions
    return {
        "response": _storable(response.text),
        "finish_reason": response.finish_reason.value,
        "num_response_tokens": response.num_tokens,
        "token_ids": response.token_ids,
        "rollout_logprobs": response.rollout_logprobs,
        "policy_version": None if versions is None or versions.size == 0 else versions.min(),
        "policy_versions": versions,
    }


def _storable(text: str) -> str:
    """The text with lone surrogates, which JSON data can hold and UTF-8 cannot, replaced by question marks."""
    return text.encode("utf-8", "replace").decode("utf-8")
