"""Model folders to policies and tokenizers."""

from collections.abc import Container
from copy import deepcopy
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import torch.nn as nn
from tokenizers import Tokenizer
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.initialization import no_init_weights

from ratoon.models.attachment import attach
from ratoon.models.compiled import set_compile
from ratoon.models.config import Compile, Dtype, Quantization, Recompute
from ratoon.models.model_files import read_json, refusing, resolve_model_path
from ratoon.models.quantised import quantise
from ratoon.models.recompute import set_recompute
from ratoon.models.refusals import refuse_config
from ratoon.models.rope import fix_rope
from ratoon.models.shape import model_shape
from ratoon.types import UserError

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tekken.json",
)
"""One of them at least makes up a tokenizer."""

DTYPES: dict[str, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load_policy(
    path: str | Path,
    *,
    dtype: Dtype = "float32",
    device: torch.device | str = "cpu",
    impl: str = "auto",
    batch_invariant: bool = False,
    recompute: Recompute = "none",
    compile: Compile = "none",
    gguf_file: str | None = None,
    rope_positions: int | None = None,
    quantization: Quantization | None = None,
    trust_remote_code: bool = False,
) -> PreTrainedModel:
    """A trainable decoder from a folder, attached and ready for packed layouts.

    path, gguf_file: as `resolve_model_path`; GGUF weights are dequantised to `dtype`.
    impl, batch_invariant: as `attach` has them.
    rope_positions: the longest sequence, for models whose rotary scaling follows the batch (`fix_rope`).
    quantization: round the linear layers' weights (`quantise`), which then are frozen.
    trust_remote_code: run Python code from the folder.

    Raises UserError for a folder that cannot be read, weights that do not fill the model, and models that
    cannot run packed layouts (before their weights are read, where the configuration tells).
    """
    model = load_model_folder(
        path,
        dtype=dtype,
        gguf_file=gguf_file,
        rope_is_fixed=rope_positions is not None,
        trust_remote_code=trust_remote_code,
    )
    if quantization is not None:
        quantise(model, torch.device(device))
    move(model, torch.device(device))
    if rope_positions is not None:
        fix_rope(model, rope_positions)
    return set_compile(set_recompute(attach(model, impl, batch_invariant=batch_invariant), recompute), compile)


def load_model_folder(
    path: str | Path,
    *,
    dtype: Dtype,
    gguf_file: str | None = None,
    rope_is_fixed: bool = False,
    trust_remote_code: bool = False,
) -> PreTrainedModel:
    """The folder's decoder on the CPU, not attached yet; otherwise as `load_policy`."""
    if dtype not in DTYPES:
        raise UserError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    folder = resolve_model_path(path, gguf_file=gguf_file)
    config = load_config(folder, gguf_file=gguf_file, rope_is_fixed=rope_is_fixed, trust_remote_code=trust_remote_code)
    with refusing(folder, "model"):
        model = _load_weights(folder, config, DTYPES[dtype], gguf_file, trust_remote_code)
        return model if gguf_file is None else _without_quantization(model)


def load_tokenizer(
    path: str | Path, *, gguf_file: str | None = None, eos_token: str | None = None, trust_remote_code: bool = False
) -> PreTrainedTokenizerBase:
    """The folder's tokenizer, with an EOS token and a PAD token (EOS where the folder has none).

    eos_token: replaces the folder's own; must be one token of its vocabulary.
    """
    folder = resolve_model_path(path, gguf_file=gguf_file)
    if gguf_file is None and not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise UserError(
            f"model folder {str(folder)!r} holds no tokenizer ({', '.join(TOKENIZER_FILES[:3])}); copy the files from "
            "where the model comes from"
        )
    with refusing(folder, "tokenizer"):
        tokenizer = AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=trust_remote_code, **_gguf_argument(gguf_file)
        )
        known = _known_tokens(folder, tokenizer)
        tokenizer.model_max_length = int(tokenizer.model_max_length)
    if eos_token is not None:
        if eos_token not in known:
            raise UserError(
                f"model.eos_token {eos_token!r} is not a token of the tokenizer in {str(folder)!r}; its special tokens "
                f"are {', '.join(map(repr, tokenizer.all_special_tokens[:12]))}"
            )
        tokenizer.eos_token = eos_token
    if tokenizer.eos_token_id is None:
        raise UserError(
            f"the tokenizer in {str(folder)!r} names no end-of-sequence token, so no response would ever end; "
            "name one with model.eos_token"
        )
    if tokenizer.eos_token not in known:
        raise UserError(
            f"the end-of-sequence token {tokenizer.eos_token!r} of the tokenizer in {str(folder)!r} is not in its "
            "vocabulary, so the model never learnt it; complete tokenizer_config.json, or name one with model.eos_token"
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def align_eos(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Makes generation and exported folders end where the tokenizer does, in place.

    Raises UserError where the model has no such token.
    """
    vocab_size = model_shape(model.config).vocab_size
    eos_token_id = tokenizer.eos_token_id
    assert isinstance(eos_token_id, int), "load_tokenizer refuses a tokenizer without EOS"
    if not 0 <= eos_token_id < vocab_size:
        raise UserError(
            f"the tokenizer's end-of-sequence token {tokenizer.eos_token!r} has id {eos_token_id}, outside the "
            f"model's vocabulary of {vocab_size:,}; is the tokenizer of the same model?"
        )
    for settings in (model.config, model.generation_config):
        if settings is not None:
            settings.eos_token_id = tokenizer.eos_token_id
            settings.pad_token_id = tokenizer.pad_token_id


def _known_tokens(folder: Path, tokenizer: PreTrainedTokenizerBase) -> Container[str]:
    """The tokens that the folder's files give ids. Transformers gives new ids to special tokens they lack."""
    file = folder / "tokenizer.json"
    if not file.is_file():
        return tokenizer.get_vocab()
    known = set(Tokenizer.from_file(str(file)).get_vocab())
    for name in ("tokenizer_config.json", "added_tokens.json"):
        if (folder / name).is_file():
            content = read_json(folder / name)
            known |= {token["content"] for token in content.get("added_tokens_decoder", {}).values()}
            known |= set(content if name == "added_tokens.json" else ())
    return known


def load_config(
    folder: Path, *, gguf_file: str | None = None, rope_is_fixed: bool = False, trust_remote_code: bool = False
) -> PreTrainedConfig:
    """The configuration of a resolved model folder.

    Raises UserError where it cannot be read, is of no known type, or can make no decoder that runs a forest.
    """
    with refusing(folder, "configuration"):
        if gguf_file is not None:
            status = (folder / gguf_file).stat()
            config = deepcopy(_gguf_config(folder, gguf_file, status.st_size, status.st_mtime_ns))
        else:
            model_type = read_json(folder / "config.json").get("model_type")
            is_known = isinstance(model_type, str) and model_type in CONFIG_MAPPING
            if not is_known and not trust_remote_code:
                raise UserError(
                    f"the model in {str(folder)!r} is of type {model_type!r}, which this version of transformers does "
                    "not know; if the folder brings its own Python code, read it and set model.trust_remote_code = true"
                )
            config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=trust_remote_code)
        refuse_config(config, rope_is_fixed=rope_is_fixed)
    brings_code = trust_remote_code and hasattr(config, "auto_map")
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING and not brings_code:
        raise UserError(
            f"the model in {str(folder)!r} is of type {config.model_type!r}, which has no causal language model in "
            "transformers; use a decoder-only model"
        )
    return config


@lru_cache(maxsize=1)
def _gguf_config(folder: Path, gguf_file: str, _size: int, _mtime_ns: int) -> PreTrainedConfig:
    # Kept, because transformers reads the vocabulary with it, which takes seconds. Changed files are read anew.
    return AutoConfig.from_pretrained(folder, local_files_only=True, gguf_file=gguf_file)


def _load_weights(
    folder: Path, config: PreTrainedConfig, dtype: torch.dtype, gguf_file: str | None, trust_remote_code: bool
) -> PreTrainedModel:
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        folder,
        config=config,
        dtype=dtype,
        local_files_only=True,
        trust_remote_code=trust_remote_code,
        use_safetensors=None if gguf_file else True,
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # they are refused below, by name
        **_gguf_argument(gguf_file),
    )
    model, report = loaded
    # Transformers fills what a checkpoint lacks with random numbers.
    lacking = sorted(report["missing_keys"]) + sorted(key for key, *_ in report["mismatched_keys"])
    if lacking:
        raise UserError(
            f"the weights in {str(folder)!r} do not fill the model: {len(lacking)} missing or of another shape, "
            f"first {lacking[0]}; is config.json of the same model?"
        )
    return model


def _without_quantization(model: PreTrainedModel) -> PreTrainedModel:
    """The same weights in a model that transformers does not count as quantised, so that it can be saved."""
    config = model.config
    vars(config).pop("quantization_config", None)
    with no_init_weights():  # neither time nor random numbers for weights that are replaced
        plain = type(model)(config)
    cast_weights(plain, model.dtype)
    plain.tie_weights()
    plain.load_state_dict(model.state_dict())
    plain.generation_config = model.generation_config
    return plain.eval()


def move(module: nn.Module, device: torch.device) -> None:
    """`module.to`, in place; transformers' own signature of it is opaque to type checkers."""
    module.to(device=device)


def cast_weights(model: nn.Module, dtype: torch.dtype) -> None:
    """Gives the parameters `dtype`, in place. Buffers stay: rotary frequencies are wrong in 16 bits."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)


def _gguf_argument(gguf_file: str | None) -> dict[str, Any]:
    return {} if gguf_file is None else {"gguf_file": gguf_file}
