"""Making a transformers decoder run packed layouts."""

from dataclasses import replace

from transformers import PreTrainedConfig, PreTrainedModel

from ratoon.models import invariant
from ratoon.models.interface import IMPLEMENTATION, Attachment, check_inputs, is_attached
from ratoon.models.invariance_check import check_invariance
from ratoon.models.invariant import make_invariant, make_plain
from ratoon.models.refusals import refuse_config, refuse_model
from ratoon.models.rope import has_fixed_rope
from ratoon.models.self_check import check_against_stock
from ratoon.models.settings import setting
from ratoon.types import UserError


def attach(model: PreTrainedModel, impl: str = "auto", *, batch_invariant: bool = False) -> PreTrainedModel:
    """Makes `model` run packed layouts, in place, and returns it. Attaching again changes the implementation.

    impl: as for `forest_attention`.
    batch_invariant: a token's log-prob is the same bits whatever else is in its layout, and as the paged engine draws
    it (`models.invariant`). A model once made so stays so, with the one implementation that is. Set it before
    recomputation.

    Afterwards the model runs with the `forest` keyword only; `stock_attention` gives it transformers' own
    attention back for a while. What cannot work is refused by name (UserError), and so is a model that does not
    pass the check of a small forest against one forward pass per sequence; the model then is as it was.
    """
    if not isinstance(model, PreTrainedModel):
        raise UserError(f"attach takes a transformers model, got {type(model).__name__}")
    if any(parameter.is_meta for parameter in model.parameters()):
        raise UserError(f"this {type(model).__name__} has no weights yet (meta device); attach it once they are loaded")
    refuse_config(model.config, rope_is_fixed=has_fixed_rope(model))
    refuse_model(model)
    before: Attachment | None = vars(model).get("_ratoon_attachment")
    batch_invariant = batch_invariant or (before is not None and before.batch_invariant)
    if batch_invariant:
        impl = _invariant_impl(impl)
        make_invariant(model)
    previous_implementation = model.config._attn_implementation
    assert previous_implementation is not None, "transformers gives every model an attention implementation"
    hook = None
    if not is_attached(model):
        hook = model.base_model.register_forward_pre_hook(check_inputs, with_kwargs=True)
    attachment = Attachment(
        impl=impl,
        calls=(),
        logit_scale=_logit_scale(model.config),
        logit_softcap=setting(model.config, "final_logit_softcapping"),
        batch_invariant=batch_invariant,
    )
    vars(model)["_ratoon_attachment"] = attachment
    try:
        model.set_attn_implementation(IMPLEMENTATION)
        calls = check_against_stock(model)
        if batch_invariant:
            check_invariance(model)
    except BaseException:
        if before is None or not before.batch_invariant:
            make_plain(model)
        model.set_attn_implementation(previous_implementation)
        if hook is not None:
            hook.remove()
        vars(model)["_ratoon_attachment"] = before
        if before is None:
            del vars(model)["_ratoon_attachment"]
        raise
    # The check was this rank's own affair.
    sequence_group = None if before is None else before.sequence_group
    vars(model)["_ratoon_attachment"] = replace(attachment, calls=calls, sequence_group=sequence_group)
    return model


def _invariant_impl(impl: str) -> str:
    if impl not in ("auto", invariant.IMPL):
        raise UserError(
            f"model.batch_invariant has an attention of its own, and model.attention asks for {impl!r}; leave "
            f'model.attention out, or set it to "{invariant.IMPL}"'
        )
    return invariant.IMPL


def _logit_scale(config: PreTrainedConfig) -> float:
    scale = setting(config, "logit_scale")
    divisor = setting(config, "logits_scaling")
    return float(1.0 if scale is None else scale) / float(1.0 if divisor is None else divisor)
