"""Groups and documents to a layout: each prompt once, nothing merged beyond that."""

# Shape letters: T rows, M scored tokens, S segments, N sequences (responses or documents).

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ratoon.layout.packed_layout import PackedLayout, build_layout
from ratoon.types.rollouts import RolloutGroup, token_array


def pack_groups(groups: Sequence[RolloutGroup]) -> PackedLayout:
    """Each group's prompt once, then its responses; every response token is scored.

    Sequences are the responses of all groups in order. A response without tokens has no segment and
    no scored token, but keeps its number. Groups are never merged, whatever their ids or prompts.
    """
    tokens: list[NDArray[np.int64]] = []
    parents: list[int] = []
    sequence_segments: list[int] = []
    for group in groups:
        prompt_segment = len(tokens)
        tokens.append(group.prompt.token_ids)
        parents.append(-1)
        for response in group.responses:
            if response.num_tokens == 0:
                sequence_segments.append(prompt_segment)
                continue
            sequence_segments.append(len(tokens))
            tokens.append(response.token_ids)
            parents.append(prompt_segment)
    return _score_all_but_roots(tokens, parents, sequence_segments)


def pack_documents(documents: Sequence[ArrayLike]) -> PackedLayout:
    """Each document a root without children; every token but a document's first is scored.

    Sequences are the documents in order; an empty document keeps its number.
    """
    arrays = [token_array(document, f"document {index}") for index, document in enumerate(documents)]
    tokens = [array for array in arrays if array.size]
    lengths = np.asarray([array.size for array in tokens], np.int64)
    is_empty_N = np.asarray([array.size == 0 for array in arrays], bool)
    sequence_segment_N = np.where(is_empty_N, -1, np.cumsum(~is_empty_N) - 1)

    token_ids_T = np.concatenate(tokens) if tokens else np.empty(0, np.int64)
    is_first_T = np.zeros(token_ids_T.size, bool)
    is_first_T[np.cumsum(lengths) - lengths] = True
    scored_row_M = np.flatnonzero(~is_first_T)
    sequence_of_T = np.repeat(np.flatnonzero(~is_empty_N), lengths)
    return build_layout(
        token_ids_T=token_ids_T,
        segment_lengths=lengths,
        segment_parent=np.full(lengths.size, -1),
        predictor_row_M=scored_row_M - 1,
        target_M=token_ids_T[scored_row_M],
        sequence_of_M=sequence_of_T[scored_row_M],
        sequence_segment_N=sequence_segment_N,
    )


def _score_all_but_roots(
    tokens: list[NDArray[np.int64]], parents: list[int], sequence_segments: list[int]
) -> PackedLayout:
    """A two-level forest in which every token below a root is scored."""
    lengths = np.asarray([array.size for array in tokens], np.int64)
    parent_S = np.asarray(parents, np.int64)
    sequence_segment_N = np.asarray(sequence_segments, np.int64)
    token_ids_T = np.concatenate(tokens) if tokens else np.empty(0, np.int64)
    ends_S = np.cumsum(lengths)
    is_child_S = parent_S >= 0

    sequence_of_S = np.full(lengths.size, -1)
    has_segment_N = is_child_S[sequence_segment_N] if sequence_segment_N.size else np.empty(0, bool)
    sequence_of_S[sequence_segment_N[has_segment_N]] = np.flatnonzero(has_segment_N)

    scored_row_M = np.flatnonzero(np.repeat(is_child_S, lengths))
    predictor_row_T = np.arange(token_ids_T.size) - 1
    # The first token of a response is predicted by its prompt's last row, wherever it is stored.
    predictor_row_T[(ends_S - lengths)[is_child_S]] = ends_S[parent_S[is_child_S]] - 1
    return build_layout(
        token_ids_T=token_ids_T,
        segment_lengths=lengths,
        segment_parent=parent_S,
        predictor_row_M=predictor_row_T[scored_row_M],
        target_M=token_ids_T[scored_row_M],
        sequence_of_M=np.repeat(sequence_of_S, lengths)[scored_row_M],
        sequence_segment_N=sequence_segment_N,
    )
