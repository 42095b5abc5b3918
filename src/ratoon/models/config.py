"""Which model is trained, and how it is held in memory."""

import string
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from ratoon.types.limits import MAX_HEADS, MAX_LAYERS, MAX_TOKENS, MAX_WIDTH

PRINTABLE_ASCII = "".join(sorted(string.digits + string.ascii_letters + string.punctuation + " \n"))

Dtype = Literal["float32", "bfloat16", "float16"]
AttentionImpl = Literal[
    "auto", "reference", "flash", "flex", "triton", "invariant",
    "triton-adding", "flash-fa4", "flash-fa3", "flash-fa2", "flash-cpu", "flex-triton", "flex-fa4",
]  # fmt: skip
Quantization = Literal["nf4"]
Recompute = Literal["none", "selective", "full"]
RecomputeChoice = Literal["auto", "none", "selective", "full"]
Compile = Literal["none", "layers"]
CompileChoice = Literal["auto", "none", "layers"]


class FreshModelConfig(BaseModel):
    """A small Qwen3 with random weights and a tokenizer of single characters, made on the spot."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    hidden_size: int = Field(default=128, ge=1, le=MAX_WIDTH)
    """Width of the residual stream."""

    intermediate_size: int = Field(default=384, ge=1, le=MAX_WIDTH)
    """Width of the MLP."""

    num_layers: int = Field(default=4, ge=1, le=MAX_LAYERS)

    num_heads: int = Field(default=4, ge=1, le=MAX_HEADS)
    """Query heads."""

    num_kv_heads: int = Field(default=2, ge=1, le=MAX_HEADS)
    """Key and value heads; divides num_heads."""

    head_dim: int = Field(default=32, ge=2, le=MAX_HEADS)
    """Width of one head; even, because rotary embedding turns pairs."""

    max_positions: int = Field(default=1024, ge=1, le=MAX_TOKENS)
    """Longest sequence in tokens, prompt and response together."""

    alphabet: str = PRINTABLE_ASCII
    """The characters the tokenizer knows, one token each; others become the unknown token."""

    tied_embeddings: bool = True
    """The output head shares the embedding's weights."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_kv_heads must divide num_heads={self.num_heads}, got {self.num_kv_heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even, got {self.head_dim}")
        if not self.alphabet:
            raise ValueError("alphabet is empty; name the characters that prompts and responses use")
        if len(set(self.alphabet)) != len(self.alphabet):
            repeated = sorted({letter for letter in self.alphabet if self.alphabet.count(letter) > 1})
            raise ValueError(f"alphabet names each character once, got {''.join(repeated)!r} repeatedly")
        return self


class LoraConfig(BaseModel):
    """Low-rank adapters (LoRA, arXiv:2106.09685): the model's own weights stay frozen, and small matrices beside them
    train. Needs peft (`pip install -e ".[lora]"` in the clone of Ratoon), and a larger `trainer.learning_rate` than
    full training: 1e-5 to 1e-4."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    rank: int = Field(default=16, ge=1, le=MAX_WIDTH)
    """Width of the two matrices beside each adapted layer."""

    alpha: int = Field(default=32, ge=1, le=MAX_WIDTH)
    """The adapters' output is multiplied by alpha / rank."""

    rslora: bool = False
    """Multiply by alpha / sqrt(rank) instead, which suits large ranks (arXiv:2312.03732)."""

    target_modules: Literal["all-linear"] | tuple[str, ...] = "all-linear"
    """Names of the layers to adapt, for example `["q_proj", "v_proj"]`; `all-linear`: every linear layer but the
    output head. Fused experts of MoE models are not linear layers and stay frozen."""

    dropout: float = 0.0
    """Must be 0."""

    @field_validator("dropout")
    @classmethod
    def _is_not_random(cls, dropout: float) -> float:
        if dropout != 0:
            raise ValueError(
                "must be 0: dropout would make the log-probs that the loss sees random, and other than those the "
                "responses were sampled with"
            )
        return dropout

    @field_validator("target_modules")
    @classmethod
    def _names_layers(cls, names: str | tuple[str, ...]) -> str | tuple[str, ...]:
        if not names or not all(names):
            raise ValueError('names no layer; give names such as "q_proj", or "all-linear"')
        return names


class ModelConfig(BaseModel):
    """The policy's weights and tokenizer, and how they run. Give either `path` or `fresh`."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    path: str | None = None
    """A model folder (safetensors or GGUF), or `package:NAME` for the folder of an installed Python package."""

    gguf_file: str | None = None
    """Name of a GGUF file inside `path`; its weights are dequantised and trained as ordinary ones."""

    fresh: FreshModelConfig | None = None
    """A randomly initialised model instead of `path`."""

    eos_token: str | None = None
    """Token that ends a response, where the folder's own is missing or wrong (as in some GGUF files)."""

    dtype: Dtype = "float32"
    """Type of the weights and of the computation."""

    lora: LoraConfig | None = None
    """Train low-rank adapters instead of the weights. Absent: every weight trains."""

    quantization: Quantization | None = None
    """`nf4`: with `lora`, hold the frozen weights of linear layers in 4 bits and a scale for every 64 (QLoRA,
    arXiv:2305.14314), 0.56 bytes a weight; embedding, head and adapters keep `dtype`. Generation and training compute
    with the rounded weights, and are slower. Needs bitsandbytes (`pip install -e ".[qlora]"` in the clone of
    Ratoon). Absent: `dtype`."""

    attention: AttentionImpl = "auto"
    """Attention implementation, or one provider of it; `auto` takes the fastest that fits and says which."""

    recompute: RecomputeChoice = "auto"
    """What the backward pass computes again to save memory: nothing, norms and MLPs, or every layer; `auto` takes the
    first of them whose largest step is predicted to fit the device, and says which. Results do not change."""

    compile: CompileChoice = "auto"
    """Run each decoder layer through torch.compile, which fuses what is around its products: 1.4 times as fast on an
    H200. `auto` does so on GPUs, experts excepted. Needs a C++ compiler on a CPU. The first steps take up to a minute
    longer."""

    batch_invariant: bool = False
    """Make every token's log-prob the same bits in rollout and in training, whatever else is in the batch, by kernels
    that take fixed sizes and orders on both sides. Slower. On the rollout engine `paged`, for dense models on a GPU;
    nothing is compiled."""

    rope_positions: int | None = Field(default=None, ge=1, le=MAX_TOKENS)
    """For rotary scalings chosen by length (dynamic, longrope): the run's longest sequence, which fixes them."""

    trust_remote_code: bool = False
    """Run Python code found in the model folder. Only for folders whose code you have read."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.path is None) == (self.fresh is None):
            given = "neither" if self.path is None else "both"
            raise ValueError(f"give exactly one of `path` and `fresh`, got {given}")
        if self.fresh is not None:
            for name in ("gguf_file", "eos_token", "rope_positions"):
                if getattr(self, name) is not None:
                    raise ValueError(f"{name} belongs to a model folder and does nothing beside `fresh`; remove it")
        if self.quantization is not None and self.lora is None:
            raise ValueError(
                "rounded weights cannot train: give adapters, [model.lora], beside quantization, or remove it"
            )
        return self

    @model_validator(mode="after")
    def _can_be_invariant(self) -> Self:
        if not self.batch_invariant:
            return self
        allowed = {"quantization": (None,), "compile": ("auto", "none"), "attention": ("auto", "invariant")}
        for name, values in allowed.items():
            if getattr(self, name) not in values:
                raise ValueError(
                    f"batch_invariant does not go with {name} = {getattr(self, name)!r}, whose arithmetic is not its "
                    f"own; remove {name}, or batch_invariant"
                )
        return self

    def compile_on(self, device_type: str, *, num_experts: int) -> Compile:
        """What `compile` comes to there, for a model with so many experts a layer (0: dense)."""
        if self.compile != "auto":
            return self.compile
        if self.batch_invariant:
            return "none"
        return "layers" if device_type == "cuda" and num_experts == 0 else "none"
