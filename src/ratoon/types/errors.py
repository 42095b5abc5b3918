"""The error that is the user's to mend, and which error it was."""

from typing import cast


class UserError(ValueError):
    """Something in the recipe, the data, the model folder or the machine must change.

    The command line prints the message as one paragraph, without a traceback, and exits
    with status 2. The message says what, got, wanted, and what to do.
    """


def first_cause(error: BaseException) -> BaseException:
    """The error itself, or the first one in a group of them: concurrent tasks fail as a group."""
    if isinstance(error, BaseExceptionGroup):
        group = cast("BaseExceptionGroup[BaseException]", error)
        return first_cause(group.exceptions[0])
    return error
