"""What the in-process engine asks of whatever runs its forward passes."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from ratoon.rollout.drafts import GroupDraft
from ratoon.rollout.errors import RolloutError
from ratoon.types import UserError


@dataclass(frozen=True, slots=True)
class StepReport:
    """What one step ended."""

    finished: tuple[GroupDraft, ...] = ()
    failed: tuple[GroupDraft, ...] = ()
    error: RolloutError | UserError | None = None
    """Why `failed` failed."""

    made_progress: bool = False


class Batch(Protocol):
    """Responses in flight. Every call comes from the engine's one thread."""

    @property
    def num_running(self) -> int:
        """Responses that hold a place in the batch."""
        ...

    def check_fits(self, prompt_id: str | int, num_prompt_tokens: int, max_response_tokens: int) -> None:
        """Raise UserError where not even one response could ever run. May come from any thread."""
        ...

    def add(self, group: GroupDraft) -> None:
        """Queue the open responses of a group, one at least, behind those that wait. Some may have tokens already."""
        ...

    def step(self) -> StepReport:
        """Admit what fits, give each running response its next token, and hand out the groups that are complete.

        Raises nothing: what goes wrong is reported with the groups it ends, and the next group meets a fresh cache.
        """
        ...

    def withdraw(self, groups: Iterable[GroupDraft]) -> None:
        """Forget the groups, whether they wait or run, and free what they hold; unknown ones are ignored."""
        ...

    def weights_changed(self) -> None:
        """The model's weights are others than in the last step: what comes of them from now on is stamped so."""
        ...

    def forget_cache(self) -> None:
        """Free the cache; the next group builds a new one. Nothing may run."""
        ...


def failure(groups: Sequence[GroupDraft], error: Exception) -> RolloutError | UserError:
    """What to tell the groups that `error` ended."""
    if isinstance(error, RolloutError | UserError):
        return error
    names = ", ".join(repr(group.prompt.id) for group in groups[:3])
    wrapped = RolloutError(
        f"generation failed for {len(groups)} prompts ({names}{', ...' if len(groups) > 3 else ''}): "
        f"{type(error).__name__}: {error}"
    )
    wrapped.__cause__ = error
    return wrapped
