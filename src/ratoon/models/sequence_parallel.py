"""One layout on several ranks: who scores which tokens, and what must hold for heads to be shared out."""

# Shape letters: U ranks of a group, T rows, B rows of one rank, M scored tokens, m scored tokens of one rank,
# C channels, X rows sent, Y rows received.

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from ratoon.attention.transfer import to_device
from ratoon.distributed import SequenceGroup
from ratoon.distributed.ulysses import exchange_rows, gather_shares, share_of
from ratoon.layout import PackedLayout
from ratoon.models.interface import attachment_of, is_batch_invariant
from ratoon.models.shape import model_shape
from ratoon.types import ModelShape, UserError
from ratoon.types.rollouts import SampledSupport


def check_sequence_parallel(shape: ModelShape, degree: int) -> None:
    """Raises UserError where `degree` ranks cannot share out the heads of a model.

    Query heads must be divisible by it. Key and value heads need not be, and may be fewer: they are then sent to
    several ranks.
    """
    if degree < 1 or shape.num_heads % degree:
        known = [count for count in range(1, shape.num_heads + 1) if shape.num_heads % count == 0]
        raise UserError(
            f"{shape.num_heads} attention heads cannot be shared out over {degree} ranks, each of which attends with "
            f"as many; for this model the degree of sequence parallelism can be {', '.join(map(str, known))}"
        )


def set_sequence_parallel(model: PreTrainedModel, group: SequenceGroup | None) -> PreTrainedModel:
    """Sets, in place, which ranks hold each layout of an attached model together; None: each rank holds its own.

    Afterwards the ranks of a group must call `forward_logprobs` together, with the same layout. Each gets all of the
    layout's log-probs and computes the same loss. Its parameters' gradients are then a part: the sum over the ranks of
    the group is the whole, as `shard_model` and `DataParallel.all_reduce_gradients` sum it.

    `stock_attention` and `attach` are each rank's own affair as before. Raises UserError as `check_sequence_parallel`.
    """
    if group is not None:
        check_sequence_parallel(model_shape(model.config), group.size)
    is_shared = group is not None and group.size > 1
    if is_shared and is_batch_invariant(model):
        raise UserError(
            "a batch-invariant model attends for all of a layout's rows on one rank; set trainer.sequence_parallel to "
            "1, or model.batch_invariant to false"
        )
    attachment = replace(attachment_of(model), sequence_group=group if is_shared else None)
    vars(model)["_ratoon_attachment"] = attachment
    return model


def sequence_group_of(model: PreTrainedModel) -> SequenceGroup | None:
    """The ranks that hold each layout of an attached model together; None: each rank holds its own."""
    return attachment_of(model).sequence_group


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredShare:
    """The scored tokens of one rank: an equal part in the layout's order, whichever ranks have their rows.

    Not those of its own rows: the prompt of a pack has few scored tokens, and its responses have many.
    """

    group: SequenceGroup

    num_scored: int
    """M."""

    tokens: slice
    """This rank's, of M."""

    sent_row_X: NDArray[np.int64]
    """[X] int64. Rows of this rank's block, in the order of the ranks they go to."""

    send_counts: tuple[int, ...]
    """[U]."""

    receive_counts: tuple[int, ...]
    """[U]."""

    place_m: NDArray[np.int64]
    """[m] int64. Which of the received rows predicts each token."""

    @classmethod
    def of(cls, layout: PackedLayout, group: SequenceGroup) -> "ScoredShare":
        """layout: padded to equal blocks."""
        block = group.block(layout.num_rows)
        num_scored = layout.num_scored
        tokens = share_of(num_scored, group)
        owner_M = layout.predictor_row_M // (block.stop - block.start)
        taker_M = np.arange(num_scored) // max(share_of(num_scored, group, 0).stop, 1)
        is_sent_M = owner_M == group.rank
        # Both sides keep the tokens' order.
        arrival_m = np.argsort(owner_M[tokens], kind="stable")
        place_m = np.empty(arrival_m.size, np.int64)
        place_m[arrival_m] = np.arange(arrival_m.size)
        return cls(
            group=group,
            num_scored=num_scored,
            tokens=tokens,
            sent_row_X=layout.predictor_row_M[is_sent_M].astype(np.int64) - block.start,
            send_counts=tuple(np.bincount(taker_M[is_sent_M], minlength=group.size).tolist()),
            receive_counts=tuple(np.bincount(owner_M[tokens], minlength=group.size).tolist()),
            place_m=place_m,
        )

    def collect(self, hidden_BC: Tensor) -> Tensor:
        """[m, C]: the hidden states that predict this rank's tokens, from all ranks' blocks."""
        device = hidden_BC.device
        sent_XC = hidden_BC.index_select(0, to_device(self.sent_row_X, device))
        received_YC = exchange_rows(sent_XC, self.send_counts, self.receive_counts, self.group)
        return received_YC.index_select(0, to_device(self.place_m, device))

    def support(self, support: SampledSupport) -> SampledSupport:
        """Of this rank's tokens, from that of all."""
        return support.part(self.tokens.start, self.tokens.stop)

    def gather(self, logprobs_m: Tensor, entropy_m: Tensor) -> tuple[Tensor, Tensor]:
        """[M], [M]: those of all ranks, the same on each."""
        logprobs_M, entropy_M = gather_shares((logprobs_m, entropy_m), self.num_scored, self.group)
        return logprobs_M, entropy_M
