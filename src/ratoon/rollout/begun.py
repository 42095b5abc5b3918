"""Groups that an earlier call began and a later one goes on with."""

# Shape letters: P prompt tokens, R response tokens, N responses.

from collections.abc import Iterator

import numpy as np

from ratoon.types import Prompt, Response, RolloutGroup, SamplingParams


def check_begun(
    begun: RolloutGroup,
    prompt: Prompt,
    *,
    group_size: int,
    sampling: SamplingParams,
    vocab_size: int,
    returns_routes: bool = False,
) -> None:
    """Raise ValueError where `begun` is no earlier group of this prompt, size and sampling, or lacks what training
    needs of the tokens it has: of each its version, its log-prob, its support where tokens are left out, and its routed
    experts where they are asked for.

    vocab_size: token ids that the model has.
    """
    name = f"prompt {prompt.id!r}: the group to go on with"
    if begun.prompt.id != prompt.id or not np.array_equal(begun.prompt.token_ids, prompt.token_ids):
        raise ValueError(
            f"{name} is of prompt {begun.prompt.id!r} of {begun.prompt.num_tokens} tokens, not of this one of "
            f"{prompt.num_tokens}; give each prompt the group that `generate` returned for it"
        )
    if begun.group_size != group_size:
        raise ValueError(f"{name} has {begun.group_size} responses, but group_size is {group_size}; they must agree")
    for index, response in enumerate(begun.responses):
        fault = next(_faults(response, sampling, vocab_size), None) or _fault_of_routes(
            response, returns_routes=returns_routes
        )
        if fault is not None:
            raise ValueError(
                f"{name}: response {index} {fault}; give the group as `generate` returned it, with the sampling of "
                "that call"
            )


def _faults(response: Response, sampling: SamplingParams, vocab_size: int) -> Iterator[str]:
    R, longest = response.num_tokens, sampling.max_response_tokens
    if longest < R:
        yield f"has {R} tokens, over max_response_tokens={longest}"
    if R == 0:
        return
    largest = int(response.token_ids.max())
    if largest >= vocab_size:
        yield f"holds token id {largest}, but the model has {vocab_size:,}"
    if response.policy_versions is None:
        yield "does not say which weights drew its tokens (policy_versions is None)"
    is_greedy = sampling.temperature == 0
    if (response.rollout_logprobs is None) != is_greedy:
        found = "rollout_logprobs" if is_greedy else "no rollout_logprobs"
        yield f"has {found}, which does not go with temperature {sampling.temperature:g}"
    is_truncated = sampling.is_truncated and not is_greedy
    if (response.support is None) == is_truncated:
        found = "no support" if is_truncated else "a support"
        yield f"has {found}, but its sampling keeps {'some' if is_truncated else 'all'} tokens"


def _fault_of_routes(response: Response, *, returns_routes: bool) -> str | None:
    has_routes = response.routed_experts is not None
    if returns_routes and response.num_tokens and not has_routes:
        return "has no routed_experts, which rollout.return_routed_experts asks for"
    if has_routes and response.can_go_on and not returns_routes:
        return (
            "has routed_experts, and none would be recorded of its next tokens (rollout.return_routed_experts is off)"
        )
    return None


def check_new_tokens(max_new_tokens: int | None) -> None:
    """Raise ValueError for a budget that allows no token."""
    if max_new_tokens is not None and max_new_tokens < 1:
        raise ValueError(
            f"max_new_tokens must be at least 1, got {max_new_tokens}; None lets responses run to their ends"
        )
