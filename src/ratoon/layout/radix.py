"""Radix packing: sequences that begin alike share rows as deep as they agree."""

# Shape letters: T rows, M scored tokens, S segments, N sequences.

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ratoon.layout.packed_layout import PackedLayout, build_layout
from ratoon.types.rollouts import token_array


@dataclass(slots=True)
class _Node:
    """A run of tokens that ends where sequences part or end."""

    depth: int
    """Tokens from the root to this node's end."""

    sequence: int
    """A sequence that runs through the node."""

    parent: int
    children: list[int] = field(default_factory=list[int])
    first_sequence: int = 0
    """The earliest sequence, in input order, that runs through the node."""


def pack_sequences(sequences: Sequence[ArrayLike]) -> PackedLayout:
    """Common prefixes once, at any depth; every token but each sequence's first is scored.

    Rows are shared, scored tokens are not: a token in the common prefix of two sequences is scored
    once for each, so a loss over scored tokens is that of the sequences packed one by one.
    Sequences keep their input number; an empty one has no scored token.
    """
    arrays = [token_array(sequence, f"sequence {index}") for index, sequence in enumerate(sequences)]
    nodes, node_of_sequence = _build_trie(arrays)
    order = _depth_first(nodes)
    segment_of_node = {node: segment for segment, node in enumerate(order)}

    def start(node: int) -> int:
        return nodes[nodes[node].parent].depth

    lengths = np.asarray([nodes[node].depth - start(node) for node in order], np.int64)
    tokens = [arrays[nodes[node].sequence][start(node) : nodes[node].depth] for node in order]
    parents = [segment_of_node.get(nodes[node].parent, -1) for node in order]
    offsets = np.concatenate([[0], np.cumsum(lengths)])

    segment_N = np.asarray([segment_of_node.get(node, -1) for node in node_of_sequence], np.int64)
    rows_to = _rows_to_each(parents, offsets)
    no_rows = np.empty(0, np.int64)
    segments: list[int] = segment_N.tolist()
    rows = [rows_to[segment] if segment >= 0 else no_rows for segment in segments]
    scored_lengths = [max(path.size - 1, 0) for path in rows]
    none = [no_rows]
    return build_layout(
        token_ids_T=np.concatenate(none + tokens),
        segment_lengths=lengths,
        segment_parent=np.asarray(parents, np.int64),
        predictor_row_M=np.concatenate(none + [path[:-1] for path in rows]),
        target_M=np.concatenate(none + [array[1:] for array in arrays]),
        sequence_of_M=np.repeat(np.arange(len(arrays)), scored_lengths),
        sequence_segment_N=segment_N,
    )


def _build_trie(arrays: list[NDArray[np.int64]]) -> tuple[list[_Node], list[int]]:
    """The compact trie of the sequences, and the node where each ends. Node 0 is the empty root.

    In sorted order a sequence shares with all before it no more than with its neighbour, so one
    walk with the open path as a stack finds every place where two part.
    """
    # Big-endian bytes sort as the ids do, and memcmp does the comparing.
    keys = [array.astype(">u4").tobytes() for array in arrays]
    nodes = [_Node(depth=0, sequence=-1, parent=0)]
    node_of_sequence = [0] * len(arrays)
    path = [0]
    previous: NDArray[np.int64] = np.empty(0, np.int64)
    for sequence in sorted(range(len(arrays)), key=keys.__getitem__):
        array = arrays[sequence]
        common = _common_prefix(previous, array)
        last = -1
        while nodes[path[-1]].depth > common:
            last = path.pop()
        if nodes[path[-1]].depth < common:  # the two part inside `last`: cut it there
            nodes.append(_Node(depth=common, sequence=sequence, parent=path[-1]))
            nodes[last].parent = len(nodes) - 1
            path.append(len(nodes) - 1)
        if array.size > common:
            nodes.append(_Node(depth=array.size, sequence=sequence, parent=path[-1]))
            path.append(len(nodes) - 1)
        node_of_sequence[sequence] = path[-1]
        previous = array
    return nodes, node_of_sequence


def _common_prefix(left: NDArray[np.int64], right: NDArray[np.int64]) -> int:
    shorter = min(left.size, right.size)
    differs = left[:shorter] != right[:shorter]
    return int(differs.argmax()) if differs.any() else shorter


def _depth_first(nodes: list[_Node]) -> list[int]:
    """Nodes below the root, parents first, children by the first sequence (in input order) through them."""
    for index, node in enumerate(nodes[1:], start=1):
        nodes[node.parent].children.append(index)
        node.first_sequence = node.sequence

    preorder: list[int] = []
    open_nodes = [0]
    while open_nodes:
        preorder.append(open_nodes.pop())
        open_nodes.extend(nodes[preorder[-1]].children)
    for index in reversed(preorder[1:]):
        parent = nodes[nodes[index].parent]
        parent.first_sequence = min(parent.first_sequence, nodes[index].first_sequence)

    order: list[int] = []
    open_nodes = [0]
    while open_nodes:
        order.append(open_nodes.pop())
        children = nodes[order[-1]].children
        open_nodes.extend(sorted(children, key=lambda child: nodes[child].first_sequence, reverse=True))
    return order[1:]


def _rows_to_each(parents: list[int], offsets: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    """For each segment, the rows from its root to its end."""
    rows: list[NDArray[np.int64]] = []
    for segment, parent in enumerate(parents):
        own = np.arange(offsets[segment], offsets[segment + 1], dtype=np.int64)
        rows.append(own if parent < 0 else np.concatenate([rows[parent], own]))
    return rows
