"""What a recipe may say about its model."""

import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import ValidationError

from ratoon.models import FreshModelConfig, ModelConfig

SOURCE = Path(__file__).parents[2] / "src"


def test_exactly_one_of_path_and_fresh():
    assert ModelConfig(path="folder").fresh is None
    assert ModelConfig(fresh=FreshModelConfig()).path is None
    with pytest.raises(ValidationError, match="exactly one of `path` and `fresh`, got neither"):
        ModelConfig()
    with pytest.raises(ValidationError, match="got both"):
        ModelConfig(path="folder", fresh=FreshModelConfig())


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"num_heads": 4, "num_kv_heads": 3}, "must divide num_heads=4, got 3"),
        ({"head_dim": 7}, "even, got 7"),
        ({"alphabet": "abca"}, "once, got 'a' repeatedly"),
        ({"alphabet": ""}, "alphabet is empty"),
        ({"hidden_size": 0}, "hidden_size"),
        ({"hiden_size": 8}, "hiden_size"),
    ],
)
def test_nonsense_is_refused_when_built(values: dict[str, object], message: str):
    with pytest.raises(ValidationError, match=message):
        FreshModelConfig.model_validate(values)


def test_what_does_nothing_beside_fresh_is_refused():
    with pytest.raises(ValidationError, match="gguf_file belongs to a model folder"):
        ModelConfig(fresh=FreshModelConfig(), gguf_file="weights.gguf")


def test_importing_the_config_imports_no_torch():
    code = "import ratoon.models.config, sys; assert not {'torch', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": str(SOURCE)})
