"""A model folder for each version of the weights: written bucket by bucket, whole before anyone is told of it."""

import copy
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from ratoon.types import UserError
from ratoon.weight_sync import iter_buckets

_BUCKET_BYTES = 1 << 30
_IN_MEMORY = Path("/dev/shm")


class WeightFolders:
    """The folders a server reads its weights from: config and tokenizer in each, so that it can start from any."""

    def __init__(self, parent: Path | None, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        """parent: that the server sees too; None: chosen by room, on this machine."""
        self._model = model
        self._tokenizer = tokenizer
        self._num_bytes = sum(each.numel() * each.element_size() for each in model.parameters())
        if parent is not None and not parent.is_dir():
            raise UserError(f"rollout.server.transfer_folder: {parent} is not a folder; make it, on a disk both see")
        self._home = Path(tempfile.mkdtemp(prefix="ratoon-weights-", dir=parent or self._roomiest()))
        # A server under another user's name must be able to read.
        self._home.chmod(0o755 if parent is not None else 0o700)
        self._newest: Path | None = None
        self._num_written = 0
        self._tied = _tied_names(model) if model.device.type == "cpu" else None

    @property
    def home(self) -> Path:
        """Holds them all, and nothing else."""
        return self._home

    @property
    def newest(self) -> Path | None:
        """The last folder that was written whole."""
        return self._newest

    def write(self, weights: Mapping[str, Tensor], version: int) -> Path:
        """A new model folder of `weights` (checkpoint name -> tensor), whole when this returns. Earlier ones stay.

        A `WeightStream` is read in order, a bucket at a time; tensors of a GPU come over one bucket at a time too.
        """
        self._num_written += 1
        final = self._home / f"version-{version}-{self._num_written}"
        partial = self._home / f"{final.name}.partial"
        partial.mkdir()
        try:
            self._config().save_pretrained(partial)
            if self._model.generation_config is not None:
                self._model.generation_config.save_pretrained(partial)
            self._tokenizer.save_pretrained(partial)
            for index, bucket in enumerate(iter_buckets(_in_order(weights, self._tied), _BUCKET_BYTES)):
                save_file(dict(bucket), partial / f"model-{index:05d}.safetensors", metadata={"format": "pt"})
            os.rename(partial, final)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        self._newest = final
        return final

    def keep_only(self, kept: Path | None) -> None:
        """Remove every folder but `kept`."""
        for folder in self._home.glob("version-*"):
            if folder != kept:
                shutil.rmtree(folder, ignore_errors=True)
        if kept != self._newest:
            self._newest = None

    def close(self) -> None:
        shutil.rmtree(self._home, ignore_errors=True)
        self._newest = None

    def _config(self) -> PreTrainedConfig:
        """The model's, with what servers choose their code by."""
        config = copy.deepcopy(self._model.config)
        # FSDP puts a class of its own before the model's.
        name = next(each.__name__ for each in type(self._model).__mro__ if each.__module__.startswith("transformers"))
        config.architectures = [name]
        config.dtype = self._model.dtype
        if self._tied is not None:
            config.tie_word_embeddings = config.get_text_config().tie_word_embeddings = False
        return config

    def _roomiest(self) -> Path:
        """In memory where two copies fit thrice over, so that the run itself has room; else the temporary folder."""
        if _IN_MEMORY.is_dir() and os.access(_IN_MEMORY, os.W_OK):
            free = shutil.disk_usage(_IN_MEMORY).free
            if free > 6 * self._num_bytes:
                return _IN_MEMORY
        return Path(tempfile.gettempdir())


def _tied_names(model: PreTrainedModel) -> tuple[str, str] | None:
    """The checkpoint names of the embedding, and of the output head where that is the same tensor.

    On a CPU vLLM multiplies by a packed copy of the head, which an update of a tied embedding leaves as it was
    (0.32.0): log-probs were 0.3 nats off. So there the head is sent as a weight of its own, and the config says so.
    """
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if head is None or head.weight is not embedding.weight:
        return None
    names = {id(module): name for name, module in model.named_modules()}
    return f"{names[id(embedding)]}.weight", f"{names[id(head)]}.weight"


def _in_order(weights: Mapping[str, Tensor], tied: tuple[str, str] | None) -> Iterator[tuple[str, Tensor]]:
    """tied: the first is given under the second name too, at once: a stream holds what was read last."""
    for name in weights:
        # A view of a larger tensor would be written with all of it, or refused.
        tensor = weights[name].detach().to("cpu")
        is_whole = (
            tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
        )
        whole = tensor if is_whole else tensor.contiguous().clone(memory_format=torch.contiguous_format)
        yield name, whole
        if tied is not None and name == tied[0]:
            yield tied[1], whole.clone()  # a file holds no tensor twice
