"""Which algorithm, and its few numbers."""

from collections.abc import Iterator
from types import MappingProxyType
from typing import Any, Literal, cast

from pydantic import BaseModel, ConfigDict, Field, model_validator

from ratoon.types.limits import MAX_FACTOR, MAX_REPEATS, MAX_RESPONSES

AlgorithmName = Literal[
    "grpo", "dr-grpo", "dapo", "rloo", "reinforce++", "reinforce++-baseline", "gspo", "cispo"
]  # fmt: skip
Advantage = Literal["group", "leave-one-out", "batch", "group-then-batch"]
LossMean = Literal["sequence", "token", "constant"]
KlEstimator = Literal["k1", "k2", "k3"]
MismatchCorrection = Literal[
    "none", "token-tis", "sequence-tis", "masked-is", "sequence-masked-is", "icepop"
]  # fmt: skip

# One row for each algorithm: what its paper sets differently from the fields' defaults.
_PAPER_SETTINGS: MappingProxyType[str, dict[str, Any]] = MappingProxyType(
    {
        "grpo": {},  # arXiv 2402.03300, eq. 3
        "dr-grpo": {"normalize_by_std": False, "loss_mean": "constant"},  # arXiv 2503.20783, §3.2
        # arXiv 2503.14476, eq. 8 and §4.1
        "dapo": {"clip_high": 0.28, "loss_mean": "token", "dynamic_sampling": True},
        # arXiv 2402.14740: a response is one action, so its tokens' log-probs are added, not averaged
        "rloo": {"advantage": "leave-one-out", "loss_mean": "constant"},
        "reinforce++": {"advantage": "batch"},  # arXiv 2501.03262
        "reinforce++-baseline": {"advantage": "group-then-batch"},  # arXiv 2501.03262
        "gspo": {"policy_loss": "gspo"},  # arXiv 2507.18071, eq. 5
        # arXiv 2506.13585, eq. 4 and §3.1
        "cispo": {"policy_loss": "cispo", "loss_mean": "token", "dynamic_sampling": True},
    }
)

_PAPER_KL: MappingProxyType[str, tuple[str, str]] = MappingProxyType(
    {"rloo": ("reward", "k1"), "reinforce++": ("reward", "k1"), "reinforce++-baseline": ("loss", "k2")}
)
"""Where a KL penalty acts and how it is estimated, once there is one. The others follow GRPO: k3 in the loss."""

# What follows from a choice where neither the algorithm nor the user says otherwise.
_SETTINGS_OF_CHOICE: tuple[tuple[str, Any, dict[str, Any]], ...] = (
    ("policy_loss", "gspo", {"clip_low": 3e-4, "clip_high": 4e-4}),  # arXiv 2507.18071, §5.1
    ("policy_loss", "cispo", {"clip_low": None, "clip_high": 4.0}),  # no lower bound: arXiv 2506.13585, §3.1
    ("advantage", "leave-one-out", {"normalize_by_std": False}),
    ("dynamic_sampling", True, {"max_sampling_rounds": 10}),
    ("mismatch_correction", "token-tis", {"mismatch_max_ratio": 2.0}),
    ("mismatch_correction", "sequence-tis", {"mismatch_max_ratio": 2.0, "mismatch_sequence_ratio": "product"}),
    ("mismatch_correction", "masked-is", {"mismatch_max_ratio": 2.0}),
    ("mismatch_correction", "sequence-masked-is", {"mismatch_max_ratio": 3.0, "mismatch_sequence_ratio": "product"}),
    ("mismatch_correction", "icepop", {"mismatch_max_ratio": 5.0, "mismatch_min_ratio": 0.5}),
)


class AlgorithmConfig(BaseModel):
    """The policy's objective. `name` sets the fields that are not given; a given value wins.

    A field that cannot act beside the others is refused, and absent (None) where it has no meaning.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    name: AlgorithmName = "grpo"
    """Sets the fields below as its paper does. No name sets a KL penalty: that takes a reference model."""

    advantage: Advantage = "group"
    """What a reward is measured against. group: the mean of the prompt's responses. leave-one-out: the mean of the
    prompt's other responses (rloo). batch: the mean of the whole step (reinforce++). group-then-batch: the group's
    mean, in units of the whole step's deviation (reinforce++-baseline)."""

    normalize_by_std: bool = True
    """Divide advantages by their standard deviation: the group's, or the step's for the two batch advantages, which
    always do so. false for dr-grpo and leave-one-out."""

    policy_loss: Literal["clip", "gspo", "cispo"] = "clip"
    """clip: PPO's clipped ratio of each token. gspo: one clipped ratio a response, the geometric mean of its tokens'.
    cispo: log-probs weighted by a bounded ratio, so that every token keeps a gradient."""

    clip_low: float | None = Field(default=0.2, ge=0, lt=1, allow_inf_nan=False)
    """The probability ratio's lower bound is 1 - clip_low. 3e-4 for gspo; absent for cispo: no lower bound."""

    clip_high: float = Field(default=0.2, ge=0, le=MAX_FACTOR, allow_inf_nan=False)
    """The probability ratio's upper bound is 1 + clip_high. 0.28 for dapo, 4e-4 for gspo, 4.0 for cispo."""

    dual_clip: float | None = Field(default=None, gt=1, le=MAX_FACTOR, allow_inf_nan=False)
    """With policy_loss clip and several updates a step: the ratio's upper bound where the advantage is negative, which
    is unbounded otherwise. 3.0 is usual."""

    loss_mean: LossMean = "sequence"
    """What weighs the same in the loss. sequence: each response of a step. token: each token (dapo, cispo). constant:
    tokens are added up and divided by responses times rollout.max_response_tokens, whatever their lengths (dr-grpo;
    rloo, whose plain sum this is but for the constant)."""

    entropy_coefficient: float = Field(default=0.0, ge=0, le=MAX_FACTOR, allow_inf_nan=False)
    """Loss per nat of mean token entropy, subtracted; 0 leaves entropy out."""

    num_minibatches: int = Field(default=1, ge=1, le=MAX_RESPONSES)
    """Optimizer updates that one rollout's groups are cut into. At 1, no ratio leaves 1 and nothing is clipped."""

    kl_coefficient: float = Field(default=0.0, ge=0, le=MAX_FACTOR, allow_inf_nan=False)
    """Weight of the KL divergence from the reference model, per nat; 0 needs no reference model. GRPO's paper has
    0.04."""

    kl_in: Literal["loss", "reward"] | None = None
    """loss: a term of the loss. reward: subtracted from each response's reward, summed over its tokens, before
    advantages. Default: reward for rloo and reinforce++, else loss."""

    kl_estimator: KlEstimator | None = None
    """Of each token, with d = log policy - log reference. k1: d (in the reward only). k2: d²/2. k3: exp(-d) - 1 + d.
    Default: k1 in the reward; in the loss k3, and k2 for reinforce++-baseline."""

    mismatch_correction: MismatchCorrection = "none"
    """Weighs each token's policy loss by the trainer's over the engine's probability at the rollout's weights.
    token-tis: cut at the largest ratio. masked-is: 0 above it. sequence-tis, sequence-masked-is: the same with one
    ratio a response. icepop: 0 outside both bounds. Needs the engine's log-probs."""

    mismatch_max_ratio: float | None = Field(default=None, ge=1, le=MAX_FACTOR, allow_inf_nan=False)
    """The largest ratio that counts in full. 2.0; sequence-masked-is 3.0; icepop 5.0."""

    mismatch_min_ratio: float | None = Field(default=None, gt=0, le=1)
    """icepop: the smallest ratio that counts. 0.5."""

    mismatch_sequence_ratio: Literal["product", "geometric-mean"] | None = None
    """One ratio a response. product: of its tokens' ratios, unbiased; typically it shrinks with length, so that
    long responses weigh less. geometric-mean: does not depend on length, and is biased. Default: product."""

    dynamic_sampling: bool = False
    """Replace groups whose rewards are all equal, which teach nothing, by groups of further prompts. true for dapo and
    cispo."""

    max_sampling_rounds: int | None = Field(default=None, ge=1, le=MAX_REPEATS)
    """Rollouts of one step at most, the first included, to fill it with groups that teach. 10."""

    mask_truncated: bool = False
    """Leave responses that the token budget ended out of the loss and of its denominators; their rewards still count in
    their group's advantages."""

    @property
    def compares_siblings(self) -> bool:
        """A prompt needs two responses or more: alone, it would have advantages of 0, or equal rewards."""
        return self.advantage != "batch" or self.dynamic_sampling

    @property
    def needs_reference(self) -> bool:
        return self.kl_coefficient > 0

    @property
    def needs_rollout_logprobs(self) -> bool:
        return self.mismatch_correction != "none"

    @model_validator(mode="before")
    @classmethod
    def _fill(cls, given: Any) -> Any:
        return _filled(cast(dict[str, Any], given)) if isinstance(given, dict) else given

    @model_validator(mode="after")
    def _every_field_can_act(self) -> "AlgorithmConfig":
        for problem in (*_advantage_problems(self), *_clip_problems(self), *_kl_problems(self), *_other_problems(self)):
            raise ValueError(problem)
        return self


def _filled(given: dict[str, Any]) -> dict[str, Any]:
    """The given fields and what follows from them. Given values win over the name's, these over a choice's."""
    name = given.get("name", "grpo")
    # An unknown name adds nothing here: the field's own check reports it.
    paper = dict(_PAPER_SETTINGS.get(name, {})) if isinstance(name, str) else {}
    # What was meant for the paper's own loss or advantage goes with it.
    for field, default, dependent in (("policy_loss", "clip", "clip_high"), ("advantage", "group", "normalize_by_std")):
        own = paper.get(field, default)
        if given.get(field, own) != own:
            paper.pop(dependent, None)
    fields = {**paper, **given}
    for field, value, settings in _SETTINGS_OF_CHOICE:
        if fields.get(field) == value:
            fields = {**settings, **fields}
    coefficient = fields.get("kl_coefficient")
    if isinstance(coefficient, int | float) and coefficient > 0:
        where, estimator = _PAPER_KL.get(name, ("loss", "k3")) if isinstance(name, str) else ("loss", "k3")
        if fields.get("kl_in", where) != where:
            where = fields["kl_in"]
            estimator = "k1" if where == "reward" else "k3"
        fields = {"kl_in": where, "kl_estimator": estimator, **fields}
    return fields


def _advantage_problems(config: AlgorithmConfig) -> Iterator[str]:
    if config.advantage == "leave-one-out" and config.normalize_by_std:
        yield "normalize_by_std = true does nothing with advantage = 'leave-one-out'; leave it out, or take 'group'"
    if config.advantage in ("batch", "group-then-batch") and not config.normalize_by_std:
        yield (
            f"normalize_by_std = false does nothing with advantage = {config.advantage!r}, which always divides by the "
            "step's deviation; leave it out, or take 'group'"
        )


def _clip_problems(config: AlgorithmConfig) -> Iterator[str]:
    if config.clip_low is None and config.policy_loss != "cispo":
        yield f"clip_low must be a number with policy_loss = {config.policy_loss!r}; only cispo may do without"
    if config.dual_clip is None:
        return
    if config.policy_loss != "clip":
        yield (f"dual_clip does nothing with policy_loss = {config.policy_loss!r}; leave it out, or take 'clip'")
    if config.num_minibatches == 1:
        yield ("dual_clip does nothing with num_minibatches = 1, where no ratio leaves 1; leave it out, or raise that")


def _kl_problems(config: AlgorithmConfig) -> Iterator[str]:
    for name in ("kl_in", "kl_estimator"):
        value: str | None = getattr(config, name)
        if not config.needs_reference and value is not None:
            yield f"{name} = {value!r} does nothing with kl_coefficient = 0; set kl_coefficient, or leave {name} out"
        if config.needs_reference and value is None:
            yield f"{name} must not be empty with kl_coefficient = {config.kl_coefficient}"
    if config.kl_in == "loss" and config.kl_estimator == "k1":
        yield (
            "kl_estimator = 'k1' does nothing in the loss: its gradient is that of the policy's own log-probs, 0 on "
            "average, so that nothing pulls towards the reference; take 'k2' or 'k3', or kl_in = 'reward'"
        )


def _other_problems(config: AlgorithmConfig) -> Iterator[str]:
    correction = config.mismatch_correction
    is_sequence = correction.startswith("sequence")
    if config.mismatch_max_ratio is not None and correction == "none":
        yield "mismatch_max_ratio does nothing with mismatch_correction = 'none'; leave it out, or choose a correction"
    if config.mismatch_min_ratio is not None and correction != "icepop":
        yield (
            f"mismatch_min_ratio does nothing with mismatch_correction = {correction!r}; leave it out, or take 'icepop'"
        )
    if config.mismatch_sequence_ratio is not None and not is_sequence:
        yield (
            f"mismatch_sequence_ratio does nothing with mismatch_correction = {correction!r}; leave it out, or take "
            "'sequence-tis' or 'sequence-masked-is'"
        )
    bounds = {
        "mismatch_max_ratio": correction != "none",
        "mismatch_min_ratio": correction == "icepop",
        "mismatch_sequence_ratio": is_sequence,
        "max_sampling_rounds": config.dynamic_sampling,
    }
    for name, is_needed in bounds.items():
        if is_needed and getattr(config, name) is None:
            yield f"{name} must not be empty here; leave it out to have its default"
    if config.max_sampling_rounds is not None and not config.dynamic_sampling:
        yield "max_sampling_rounds does nothing with dynamic_sampling = false; leave it out, or turn that on"
