import re
import subprocess
import sys
from typing import Any

import pytest
from pydantic import ValidationError

from ratoon.data import DataConfig


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "needs either source or [[data.sources]] tables, got neither"),
        ({"source": "a.csv", "sources": ({"source": "b.csv"},)}, "got both"),
        ({"sources": ({"source": "b.csv"},), "split": "test"}, "data.split cannot act on several sources"),
        ({"sources": ({"source": "x/b.csv"}, {"source": "y/b.csv"})}, 'both called "b.csv"; give each a name'),
        ({"sources": ({"source": "b.csv", "weight": 1.0}, {"source": "c.csv"})}, "data.sources[1] has no weight"),
        ({"sources": ({"source": "b.csv", "weight": 0.0},)}, "greater than 0"),
        ({"sources": ({"source": "b.csv", "weight": float("inf")},)}, "finite number"),
        ({"sources": ({"source": "reasoning-gym:gcd"},)}, "needs data.sources[0].size"),
        ({"sources": ({"source": "reasoning-gym:gcd", "size": 1},), "prompt_column": "q"}, "data.prompt_column cannot"),
        (
            {"sources": ({"source": "reasoning-gym:gcd", "size": 1, "answer_column": "a"},)},
            "data.sources[0].answer_column cannot act",
        ),
        ({"sources": ({"source": "b.csv", "prompt_template": "x"},)}, "data.sources[0].prompt_template must hold"),
        ({"sources": ({"source": "b.csv", "size": 4},)}, "max_rows limits the rows of files"),
        (
            {"sources": ({"source": "b.csv", "system_prompt": "x"},), "chat_template": False},
            "data.sources[0].system_prompt needs data.chat_template",
        ),
        ({"source": "a.parquet", "split": "test"}, "only dataset folders have splits"),
        ({"source": "reasoning-gym:gcd", "size": 3, "max_rows": 2}, "data.max_rows cannot act"),
        ({"source": "a.csv", "filter": "keep.py"}, "must be python:FILE.py:FUNCTION"),
        ({"source": "a.csv", "filter": "python:keep:keep"}, "must be python:FILE.py:FUNCTION"),
        ({"source": "reasoning-gym:", "size": 3}, "lacks a name"),
        ({"source": "reasoning-gym:gcd"}, "needs data.size"),
        ({"source": "reasoning-gym:gcd", "size": 3, "options": {"seed": 1}}, "write it as data.seed"),
        ({"source": "reasoning-gym:gcd", "size": 3, "prompt_column": "q"}, "data.prompt_column cannot act"),
        ({"source": "a.jsonl", "size": 3}, "data.size cannot act"),
        ({"source": "a.jsonl", "options": {"x": 1}}, "data.options cannot act"),
        ({"source": "a.jsonl", "prompt_column": "x", "answer_column": "x"}, "name two"),
        ({"source": "a.jsonl", "prompt_template": "Question: prompt"}, "must hold {prompt}"),
        ({"source": "a.jsonl", "chat_template": False, "system_prompt": "Be brief."}, "needs data.chat_template"),
        ({"source": "a.jsonl", "over_long": "drop"}, "data.max_prompt_tokens, which is not set"),
        ({"source": "a.jsonl", "over_long": "truncate", "max_prompt_tokens": 3}, "'error' or 'drop'"),
        ({"source": "a.jsonl", "seed": -1}, "greater than or equal to 0"),
        ({"source": "a.jsonl", "num_heldout": -1}, "greater than or equal to 0"),
        ({"source": "a.jsonl", "shuffel": True}, "Extra inputs are not permitted"),
    ],
)
def test_settings_that_cannot_act_are_refused(settings: dict[str, Any], message: str):
    with pytest.raises(ValidationError, match=re.escape(message)):
        DataConfig.model_validate(settings)


def test_every_setting_is_described():
    assert all(field.description for field in DataConfig.model_fields.values())


def test_settings_import_without_torch():
    code = (
        "import sys, ratoon.data.config, ratoon.rewards.config; assert not {'torch','transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": ":".join(sys.path)})
