"""How an attached model meets transformers: the attention function, the input checks, and the way back."""

# Shape letters: T rows, H heads, D head dim.

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ratoon.attention import AttentionRequest, explain_choice, forest_attention
from ratoon.attention.request import Feature
from ratoon.distributed import SequenceGroup
from ratoon.distributed.ulysses import gather_heads, own_heads, scatter_heads
from ratoon.models.forest import AttentionCall, Forest
from ratoon.models.graph_attention import attend_in_graph

IMPLEMENTATION = "ratoon"
"""Our name in transformers' tables of attention and mask functions."""

_HARMLESS_KEYWORDS = frozenset(
    {
        "cache_position",
        "is_causal",
        "layer_idx",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "position_ids",
        "return_dict",
        "use_cache",
    }
)
"""What models hand their attention function that does not change its result here."""

_HOW_TO_CALL = (
    "call ratoon.models.forward_logprobs(model, layout), or "
    "model(input_ids=forest.token_ids_1T, forest=forest) with forest = Forest.build(layout, device=...)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Attachment:
    """What `attach` found out about a model."""

    impl: str

    calls: tuple[AttentionCall, ...]
    """[L] what each layer asks of its attention."""

    logit_scale: float
    """Multiplies the head's output (Cohere; Granite divides by its inverse)."""

    logit_softcap: float | None
    """Caps the head's output (Gemma 2)."""

    batch_invariant: bool = False
    """Whether a row's result is the same bits whatever else is in its pass (`models.invariant`)."""

    sequence_group: SequenceGroup | None = None
    """The ranks that hold each layout together (`set_sequence_parallel`); None: each rank has its own."""


def is_attached(model: nn.Module) -> bool:
    return "_ratoon_attachment" in vars(model)


def is_batch_invariant(model: nn.Module) -> bool:
    """Whether `attach` has made it so."""
    return is_attached(model) and vars(model)["_ratoon_attachment"].batch_invariant


def attachment_of(model: PreTrainedModel) -> Attachment:
    """What `attach` left on the model. Raises ValueError on any other model."""
    if not is_attached(model):
        raise ValueError(
            f"this {type(model).__name__} is not attached, and its own attention would read a packed layout wrongly; "
            "call ratoon.models.attach(model) first"
        )
    return vars(model)["_ratoon_attachment"]


def head_of(model: PreTrainedModel) -> nn.Linear:
    """The layer that turns hidden states into logits."""
    head = model.get_output_embeddings()
    assert isinstance(head, nn.Linear), f"attach accepted a head of type {type(head).__name__}"
    return head


def attention_choices(model: PreTrainedModel) -> tuple[str, ...]:
    """Which kernels an attached model's layers get, and why: a line for each kind of layer, for logs.

    A layer whose window no sequence of a layout outgrows is run as a global one.
    """
    attachment = attachment_of(model)
    layers: dict[tuple[int | None, AttentionRequest], int] = {}
    for call in attachment.calls:
        layers[call.window, call.request] = layers.get((call.window, call.request), 0) + 1
    lines: list[str] = []
    for (window, request), num_layers in layers.items():
        head_dim = "/".join(str(dim) for dim in dict.fromkeys((request.head_dim, request.v_head_dim)))
        kind = "global" if window is None else f"window {window}"
        count = f"{num_layers} layer" + ("s" if num_layers > 1 else "")
        lines.append(explain_choice(request, attachment.impl, f"{count}, head dim {head_dim}, {kind}"))
    return tuple(lines)


@contextmanager
def stock_attention(model: PreTrainedModel, implementation: str) -> Iterator[PreTrainedModel]:
    """Inside, an attached model runs transformers' own attention, to generate with the same weights.

    implementation: a name of transformers' (`eager`, `sdpa`, `paged|sdpa`, ...). The previous one is
    restored on the way out, after an error too. Packed layouts are refused inside. Nothing is compiled inside, in any
    thread: compiled layers run as they are.
    """
    previous = model.config._attn_implementation
    assert previous is not None, "transformers gives every model an attention implementation"
    if implementation == IMPLEMENTATION:
        raise ValueError(f"stock_attention takes the name of a transformers attention, got {implementation!r}")
    try:
        model.set_attn_implementation(implementation)
        with torch.compiler.set_stance("force_eager"):
            yield model
    finally:
        model.set_attn_implementation(previous)


def check_inputs(
    body: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Runs before the decoder's forward pass: a forest and our attention come together or not at all."""
    config = body.config
    assert isinstance(config, PreTrainedConfig), "a transformers model without a configuration"
    is_ours = config._attn_implementation == IMPLEMENTATION
    forest = kwargs.get("forest")
    if forest is None and not is_ours:
        return args, kwargs
    if not isinstance(forest, Forest):
        raise ValueError(
            f"this model is attached for packed layouts and needs forest=Forest(...), got {type(forest).__name__}; "
            f"{_HOW_TO_CALL}. To generate, or to run plain sequences, use "
            "`with ratoon.models.stock_attention(model, 'sdpa'):`"
        )
    if not is_ours:
        raise ValueError(
            f"a forest was passed while the model runs transformers' {config._attn_implementation!r} attention, "
            "which would let responses read one another; leave stock_attention first"
        )
    if ALL_ATTENTION_FUNCTIONS.get(IMPLEMENTATION) is not attend_forest:
        raise ValueError(
            f"another attention function was registered with transformers under our name {IMPLEMENTATION!r}, which "
            "would let responses read one another; register it under a name of its own"
        )
    if len(args) > 1:
        raise ValueError("pass everything but input_ids by keyword to an attached model")
    if kwargs.get("attention_mask") is not None:
        raise ValueError(
            f"attention_mask of shape {tuple(kwargs['attention_mask'].shape)} was passed to an attached model; "
            "the forest says who reads whom, and a packed layout has no padding: leave the mask out"
        )
    if kwargs.get("past_key_values") is not None or kwargs.get("use_cache"):
        raise ValueError("an attached model keeps no cache; use stock_attention to generate")
    _check_tokens(args[0] if args else kwargs.get("input_ids"), forest)
    _check_length(body, forest)
    kwargs["position_ids"] = _checked_positions(kwargs.get("position_ids"), forest)
    kwargs["use_cache"] = False
    return args, kwargs


def _check_tokens(input_ids: Tensor | None, forest: Forest) -> None:
    if input_ids is not None and input_ids.shape != forest.token_ids_1T.shape:
        raise ValueError(
            f"input_ids must be the forest's, {list(forest.token_ids_1T.shape)}, got {list(input_ids.shape)}; "
            f"{_HOW_TO_CALL}"
        )


def _check_length(body: nn.Module, forest: Forest) -> None:
    """Learned positions end; on a GPU a longer sequence would end the process."""
    longest = int(forest.layout.positions_T.max(initial=-1)) + 1
    for name, module in body.named_children():
        holds_positions = name == "wpe" or "position" in name
        if holds_positions and isinstance(module, nn.Embedding) and longest > module.num_embeddings:
            raise ValueError(
                f"a sequence of {longest:,} tokens is longer than the {module.num_embeddings:,} positions that "
                f"{type(body).__name__} has learned ({name}); shorten prompts or responses, or use another model"
            )


def _checked_positions(position_ids: Tensor | None, forest: Forest) -> Tensor:
    if position_ids is None or position_ids is forest.positions_1T:
        return forest.positions_1T
    if position_ids.shape != forest.positions_1T.shape:
        raise ValueError(
            f"position_ids must be the forest's, {list(forest.positions_1T.shape)}, got {list(position_ids.shape)}; "
            "positions of several axes (MRoPE) are not supported. Leave position_ids out"
        )
    if not torch.equal(position_ids, forest.positions_1T):
        raise ValueError("position_ids differ from the forest's logical positions; leave position_ids out")
    return forest.positions_1T


def _no_mask(*_: Any, attention_mask: Tensor | None = None, **__: Any) -> None:
    """Our entry in transformers' table of mask functions: the forest is the mask."""
    if attention_mask is not None:
        raise ValueError(
            f"attention_mask of shape {tuple(attention_mask.shape)} was passed to an attached model; leave it out"
        )


def attend_forest(
    module: nn.Module,
    query_1HTD: Tensor,
    key_1HTD: Tensor,
    value_1HTD: Tensor,
    attention_mask: Tensor | None = None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    forest: Forest | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Our entry in transformers' table of attention functions: [1, H, T, D] -> [1, T, H, D].

    The window, softcap and sinks are the layer's own: hybrids get one plan for each distinct window. Where ranks hold
    the forest together, T is this rank's rows, and it attends for all rows with its part of the heads.
    """
    if forest is None:
        raise ValueError(f"the attention of an attached model was called without its forest; {_HOW_TO_CALL}")
    if attention_mask is not None:
        raise ValueError(
            f"an attention mask of shape {tuple(attention_mask.shape)} reached an attached model; leave it out"
        )
    if dropout:
        raise ValueError(f"attention dropout is {dropout}, and log-probs must not be random; set it to 0")
    unknown = sorted(name for name, value in others.items() if value is not None and name not in _HARMLESS_KEYWORDS)
    if unknown:
        raise ValueError(
            f"{type(module).__name__} hands its attention {', '.join(unknown)}, which attention over a forest "
            "does not know and may not ignore"
        )
    if query_1HTD.shape[0] != 1 or query_1HTD.shape[2] != key_1HTD.shape[2]:
        raise ValueError(
            f"a forest is one row of tokens without a cache, got queries of shape {list(query_1HTD.shape)} "
            f"and keys of shape {list(key_1HTD.shape)}"
        )
    q_THD, k_THD, v_THD = (x_1HTD[0].transpose(0, 1) for x_1HTD in (query_1HTD, key_1HTD, value_1HTD))
    if torch.compiler.is_compiling() and forest.fits_a_graph:
        scale = 1 / math.sqrt(q_THD.shape[2]) if scaling is None else scaling
        out_THD = attend_in_graph(
            q_THD, k_THD, v_THD, s_aux, forest.number,
            window=sliding_window, softmax_scale=scale, softcap=softcap,
        )  # fmt: skip
        return out_THD[None], None
    out_THD = _attend(module, q_THD, k_THD, v_THD, s_aux, forest, sliding_window, scaling, softcap)
    if forest.calls is not None:
        forest.calls.append(_describe_call(module, query_1HTD, value_1HTD, sliding_window, softcap, s_aux))
    return out_THD[None], None


@torch.compiler.disable(reason="its plan and its kernels are no graph's business")
def _attend(
    module: nn.Module,
    q_THD: Tensor,
    k_THD: Tensor,
    v_THD: Tensor,
    sinks_H: Tensor | None,
    forest: Forest,
    window: int | None,
    softmax_scale: float | None,
    softcap: float | None,
) -> Tensor:
    if forest.keeps is not None:
        forest.keeps.record(module, k_THD, v_THD)
    if forest.kept is not None:
        k_THD, v_THD = forest.kept.before(module, k_THD, v_THD)
    group = forest.sequence_group
    if group is not None:
        q_THD, k_THD, v_THD = scatter_heads(q_THD, k_THD, v_THD, group)
        sinks_H = None if sinks_H is None else own_heads(sinks_H, group)
    out_THD = forest_attention(
        q_THD,
        k_THD,
        v_THD,
        forest.plan_for(window),
        softmax_scale=softmax_scale,
        softcap=softcap,
        sinks_H=sinks_H,
        impl=forest.impl,
    )
    return out_THD if group is None else gather_heads(out_THD, group)


def _describe_call(
    module: nn.Module,
    query_1HTD: Tensor,
    value_1HTD: Tensor,
    window: int | None,
    softcap: float | None,
    sinks_H: Tensor | None,
) -> AttentionCall:
    asked: dict[Feature, bool] = {
        "sliding window": window is not None,
        "softcap": softcap is not None,
        "sinks": sinks_H is not None,
    }
    request = AttentionRequest(
        device_type=query_1HTD.device.type,
        dtype=query_1HTD.dtype,
        head_dim=query_1HTD.shape[3],
        v_head_dim=value_1HTD.shape[3],
        features=frozenset(feature for feature, is_asked in asked.items() if is_asked),
    )
    return AttentionCall(module_class=type(module), window=window, request=request)


# Here, so that an attached model finds them wherever it is unpickled: its hook brings this module.
AttentionInterface.register(IMPLEMENTATION, attend_forest)
AttentionMaskInterface.register(IMPLEMENTATION, _no_mask)
