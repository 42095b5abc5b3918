"""Log-probs of a layout's scored tokens under a model, without the logits of all of them."""

# Shape letters: T rows, M scored tokens, C channels, V vocabulary.

from functools import partial

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ratoon.attention.transfer import to_device
from ratoon.distributed import idle_layout, is_sharded, run_in_root
from ratoon.layout import PackedLayout
from ratoon.models.forest import Forest
from ratoon.models.graph_attention import held
from ratoon.models.interface import attachment_of, head_of
from ratoon.models.invariant import invariant_logprobs, with_value_of
from ratoon.models.kept_prompt import KeptPrompt
from ratoon.models.logits import float32_logits
from ratoon.models.sequence_parallel import ScoredShare
from ratoon.ops import linear_logprob, support_logprob
from ratoon.types.rollouts import SampledSupport


def forward_logprobs(
    model: PreTrainedModel,
    layout: PackedLayout,
    temperature: float = 1.0,
    *,
    support: SampledSupport | None = None,
    kept: KeptPrompt | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-prob and entropy (nats) of each scored token: [M], [M], differentiable.

    temperature: divides the logits, after the model's own logit scale and cap, as in sampling.
    support: of M tokens; log-prob and entropy are then those of the distribution over each token's kept tokens, which
    is what truncated sampling drew from. The sets stay as they were in rollout while the model moves.

    Of a batch-invariant model the log-probs without a support are the bits that the paged engine draws with; entropy
    and gradients are as ever.

    kept: the layout's prompt, computed before; only the rows behind it run. The layout is one group.

    The decoder's body runs once over the layout's rows; the head only where a token is scored. A layout without
    scored tokens gives empty results and does not run the model, unless it is sharded: then the other ranks wait for
    this one's part, and it runs `idle_layout`, as backward from the empty results does. Under `set_sequence_parallel`
    the ranks of a group call it together, with the same layout, and each gets all results. Raises ValueError where a
    token id is not in the model's vocabulary, where `support` is not of the layout's scored tokens, and where `kept` is
    another prompt.
    """
    attachment = attachment_of(model)
    if not isinstance(layout, PackedLayout):
        raise ValueError(
            f"layout must be a PackedLayout, got {type(layout).__name__}; "
            "make one with ratoon.layout.pack_groups, pack_sequences or pack_documents"
        )
    head = head_of(model)
    _check_vocabulary(layout, head.weight.shape[0])
    if support is not None and support.num_tokens != layout.num_scored:
        raise ValueError(
            f"support is of {support.num_tokens} tokens, the layout scores {layout.num_scored}; "
            "concatenate the supports of the layout's responses, in its order"
        )
    if layout.num_scored == 0 and is_sharded(model):
        logprobs_M, entropy_M = forward_logprobs(model, idle_layout(), temperature)
        return logprobs_M[:0], entropy_M[:0]
    if layout.num_scored == 0:
        dtype = torch.promote_types(head.weight.dtype, torch.float32)
        empty_M = torch.zeros(0, dtype=dtype, device=head.weight.device)
        return empty_M, empty_M.clone()
    forest = Forest.build(
        layout,
        device=model.device,
        impl=attachment.impl,
        sequence_group=attachment.sequence_group,
        kept=None if kept is None else kept.keys_of(layout),
    )
    return run_in_root(model, lambda: score_forest(model, forest, temperature, support=support))


def score_forest(
    model: PreTrainedModel, forest: Forest, temperature: float = 1.0, *, support: SampledSupport | None = None
) -> tuple[Tensor, Tensor]:
    """`forward_logprobs` of a layout that is already on its device and has a scored token."""
    attachment = attachment_of(model)
    head = head_of(model)
    hidden_TC = held(model.base_model(input_ids=forest.token_ids_1T, forest=forest, use_cache=False)[0][0], forest)
    layout, share, target_M = forest.layout, None, forest.layout.target_M
    if forest.sequence_group is None:
        predictor_row_M = layout.predictor_row_M
        if forest.kept is not None:  # the prompt's last row stands before the rows that were computed
            assert forest.kept.last_hidden_1C is not None, "the prompt has had its pass"
            hidden_TC = torch.cat([forest.kept.last_hidden_1C, hidden_TC])
            predictor_row_M = predictor_row_M - (forest.first_row - 1)
        hidden_MC = hidden_TC.index_select(0, to_device(predictor_row_M, hidden_TC.device, torch.int64))
    else:
        share = ScoredShare.of(layout, forest.sequence_group)
        hidden_MC, target_M = share.collect(hidden_TC), target_M[share.tokens]
        support = None if support is None else share.support(support)
    score = linear_logprob if support is None else partial(support_logprob, support=support)
    logprobs_M, entropy_M = score(
        hidden_MC,
        head.weight,
        to_device(target_M, hidden_TC.device),
        temperature=temperature,
        bias=head.bias,
        logit_scale=attachment.logit_scale,
        logit_softcap=attachment.logit_softcap,
    )
    if attachment.batch_invariant and support is None:
        vocab_size = head.weight.shape[0]
        value_M = invariant_logprobs(
            partial(float32_logits, model), hidden_MC.detach(), to_device(target_M, hidden_TC.device), temperature,
            vocab_size,
        )  # fmt: skip
        logprobs_M = with_value_of(logprobs_M, value_M)
    return (logprobs_M, entropy_M) if share is None else share.gather(logprobs_M, entropy_M)


def _check_vocabulary(layout: PackedLayout, vocab_size: int) -> None:
    largest = max(int(layout.token_ids_T.max(initial=0)), int(layout.target_M.max(initial=0)))
    if largest >= vocab_size:
        raise ValueError(
            f"token id {largest} is outside the model's vocabulary of {vocab_size:,}; "
            "was the data tokenized with another model's tokenizer?"
        )
