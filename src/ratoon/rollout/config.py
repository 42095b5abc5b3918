"""How many responses are drawn, from which distribution, and what the engine may hold."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from ratoon.rollout.engines.http.config import ServerConfig
from ratoon.rollout.engines.vllm.config import VllmConfig
from ratoon.types.limits import MAX_CACHE_TOKENS, MAX_GROUP_SIZE, MAX_MIB, MAX_RESPONSES, MAX_TOKENS, MAX_VOCABULARY
from ratoon.types.sampling import SamplingParams

EngineName = Literal["transformers", "paged", "vllm", "vllm-server", "sglang-server"]

_ENGINES_OF_TABLE = {"server": ("vllm-server", "sglang-server"), "vllm": ("vllm",)}

_BYTES_PER_KEPT_ID = 4
"""`SampledSupport.token_ids` are int32."""


class RolloutConfig(BaseModel):
    """The `[rollout]` table of a recipe."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    engine: Literal[EngineName, "auto"] = "auto"
    """`"transformers"` and `"paged"` generate in this process, on the trainer's own weights: by transformers'
    continuous batching, or response by response over a paged cache, in CUDA graphs where there is a GPU. `"vllm"`
    generates in this process too, on a copy of them (`[rollout.vllm]`); `"vllm-server"` and `"sglang-server"` on the
    server of `[rollout.server]`. `"auto"` is `"paged"` on a GPU, unless the model is quantised, and anywhere with
    `return_routed_experts` or `model.batch_invariant`, which need it; else `"transformers"`."""

    server: ServerConfig = ServerConfig()
    """Of the engines `vllm-server` and `sglang-server`."""

    vllm: VllmConfig = VllmConfig()
    """Of the engine `vllm`."""

    prompts_per_step: int = Field(default=8, ge=1, le=MAX_RESPONSES)
    """Prompts of one step, which is one rollout and the updates made from it; it trains on
    `prompts_per_step * group_size` responses."""

    group_size: int = Field(default=8, ge=1, le=MAX_GROUP_SIZE)
    """Responses drawn for each prompt; times `prompts_per_step`, at most 131,072."""

    temperature: float = Field(default=1.0, ge=1e-6, le=1e6)
    """Divides the logits, in rollout and in training alike."""

    top_p: float = Field(default=1.0, gt=0, le=1)
    """Draw among the fewest likeliest tokens whose probabilities add up to at least this; 1 keeps all. Training scores
    each token among those that were kept for it in rollout. After `temperature` and `top_k`, before `min_p`."""

    top_k: int = Field(default=0, ge=0, le=MAX_VOCABULARY)
    """Draw among this many likeliest tokens, at least 2; 0 keeps all."""

    min_p: float = Field(default=0.0, ge=0, lt=1)
    """Draw among tokens at least this many times as likely as the likeliest; 0 keeps all."""

    max_response_tokens: int = Field(default=256, ge=1, le=MAX_TOKENS)
    """A response is cut after this many tokens, EOS included."""

    max_new_tokens_per_step: int | None = Field(default=None, ge=1, le=MAX_TOKENS)
    """Partial rollouts (Kimi k1.5, arXiv:2501.12599): a response has at most this many tokens drawn in one step, and
    goes on in the next one under the weights of then. A step trains on groups of which every response ended. Fewer than
    `max_response_tokens`. Absent: every response runs to its end in the step that began it."""

    stop: tuple[str, ...] = ()
    """Strings that end a response as soon as its text holds one; the string is kept."""

    max_concurrent_responses: int = Field(default=128, ge=1, le=MAX_GROUP_SIZE)
    """Responses that generate at a time; the others wait their turn."""

    cache_tokens: int | None = Field(default=None, ge=1, le=MAX_CACHE_TOKENS)
    """Cap of the key/value cache in tokens, a prompt counted once for its group. When absent it holds what
    `max_concurrent_responses` of the longest prompts and responses so far can fill; never all free memory."""

    max_support_mib: int = Field(default=1024, ge=1, le=MAX_MIB)
    """MiB of main memory for the ids of the kept tokens of all groups that a step has, 4 bytes each, an equal share for
    each response. `top_k` bounds them (`max_response_tokens * top_k` a response); `top_p` and `min_p` keep most of the
    vocabulary where a distribution is flat. More ends the run and says so."""

    return_routed_experts: bool = False
    """Record the experts that the router chose for each token of a mixture of experts (`Response.routed_experts`): 2
    bytes for each token, layer and chosen expert, in main memory. On the engine `paged`."""

    timeout_s: float = Field(default=300.0, gt=0, le=604_800, allow_inf_nan=False)
    """A generate call that sees no new token for this many seconds ends the run and says what it waited for."""

    @field_validator("stop")
    @classmethod
    def _no_empty_stop(cls, stop: tuple[str, ...]) -> tuple[str, ...]:
        if any(not text for text in stop):
            raise ValueError("holds an empty string, which would end every response at once; remove it")
        return stop

    @field_validator("top_k")
    @classmethod
    def _leaves_a_choice(cls, top_k: int) -> int:
        if top_k == 1:
            raise ValueError("leaves one token to draw, with log-prob 0 and nothing to learn; use 0 (all), 2 or more")
        return top_k

    @model_validator(mode="after")
    def _parts_are_parts(self) -> "RolloutConfig":
        part = self.max_new_tokens_per_step
        if part is not None and part >= self.max_response_tokens:
            raise ValueError(
                f"max_new_tokens_per_step = {part} does nothing with max_response_tokens = {self.max_response_tokens}, "
                "which no response passes in one step; leave it out, or lower it"
            )
        return self

    @model_validator(mode="after")
    def _tables_are_the_engines(self) -> "RolloutConfig":
        for name, engines in _ENGINES_OF_TABLE.items():
            table: BaseModel = getattr(self, name)
            changed = [key for key, value in table if value != type(table).model_fields[key].default]
            if changed and self.engine not in engines:
                raise ValueError(
                    f'{name}.{changed[0]} does not act on engine = "{self.engine}", only on '
                    f"{' and '.join(map(repr, engines))}; leave [rollout.{name}] out (in a command: "
                    f"--rollout.{name}={{}}), or set engine"
                )
        return self

    @model_validator(mode="after")
    def _routes_are_recorded(self) -> "RolloutConfig":
        if self.return_routed_experts and self.engine not in ("auto", "paged"):
            raise ValueError(
                f'return_routed_experts: engine = "{self.engine}" does not say which experts it chose; set engine = '
                '"paged", or leave it out'
            )
        return self

    def engine_on(self, device_type: str, *, is_quantised: bool, is_batch_invariant: bool) -> EngineName:
        """What "auto" is for such a model there; a name is obeyed.

        `paged` is ten times and more as fast on a GPU, and `transformers` is the faster one on a CPU. Quantised layers
        have not been run inside CUDA graphs.
        """
        if self.engine != "auto":
            return self.engine
        is_needed = self.return_routed_experts or is_batch_invariant
        return "paged" if is_needed or (device_type == "cuda" and not is_quantised) else "transformers"

    @property
    def responses_per_step(self) -> int:
        return self.prompts_per_step * self.group_size

    @property
    def max_parts(self) -> int:
        """Steps that the longest response is drawn in."""
        part = self.max_new_tokens_per_step
        return 1 if part is None else -(-self.max_response_tokens // part)

    @property
    def max_support_ids(self) -> int:
        """Kept token ids that one response may record, on average over its group."""
        # With partial rollouts: of each of the last max_parts steps, and less than one step's that wait complete.
        num_steps_held = self.max_parts if self.max_parts == 1 else self.max_parts + 1
        return (self.max_support_mib << 20) // _BYTES_PER_KEPT_ID // (self.responses_per_step * num_steps_held)

    def sampling_params(self, seed: int) -> SamplingParams:
        """The distribution to train on; `seed` is the run's."""
        return SamplingParams(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            max_response_tokens=self.max_response_tokens,
            stop=self.stop,
            seed=seed,
        )
