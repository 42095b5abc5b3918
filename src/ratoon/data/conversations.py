"""Prompts that are conversations: lists of messages with role and content."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

from ratoon.data.rows import Message, short_repr
from ratoon.types.errors import UserError

_ROLES = ("system", "developer", "user", "assistant", "tool")
_MAY_BE_LAST = ("user", "tool")
_IGNORED_KEYS = ("name",)
"""Beside role and content; chat templates have no place for it."""


def parse_conversation(value: Sequence[Any], where: str) -> tuple[Message, ...]:
    """The messages of a prompt column's list. `where` names file, row and column in errors.

    Raises UserError for an empty list, for roles that chat templates do not know, for content that is not text, and
    for a conversation that does not end with a turn that the policy is to answer.
    """
    if not value:
        raise UserError(f"{where} is an empty conversation; remove the row or give it a user's message")
    messages = tuple(_parse_message(item, f"{where}, message {number},") for number, item in enumerate(value, start=1))
    if messages[-1].role not in _MAY_BE_LAST:
        raise UserError(
            f"{where} is a conversation that ends with the {messages[-1].role}'s message; the policy answers a user: "
            "remove that message, or put it into the answer column"
        )
    return messages


def _parse_message(item: Any, where: str) -> Message:
    if not isinstance(item, Mapping):
        raise UserError(f"{where} is {short_repr(item)}; a message is an object with role and content")
    message = {key: value for key, value in cast(Mapping[Any, Any], item).items() if value is not None}
    if "role" not in message or "content" not in message:
        keys = ", ".join(sorted(map(str, message))) or "nothing"
        raise UserError(f"{where} has {keys}; a message needs role and content, both with a value")
    role, content = message.pop("role"), message.pop("content")
    if role not in _ROLES:
        raise UserError(f"{where} has the role {short_repr(role)}; allowed: {', '.join(_ROLES)}")
    for key, extra in message.items():
        if key not in _IGNORED_KEYS and extra not in ([], {}, ""):
            raise UserError(f"{where} has {short_repr(key)}, which is not supported; remove it")
    return Message(role, content if isinstance(content, str) else _join_parts(content, where))


def _join_parts(content: Any, where: str) -> str:
    """Content written as a list of parts, all of which must be text."""
    if not isinstance(content, list):
        raise UserError(f"{where} has content that is no text: {short_repr(content)}")
    texts: list[str] = []
    for part in cast(list[Any], content):
        match part:
            case {"type": "text", "text": str(text)}:
                texts.append(text)
            case {"type": str(kind)} if kind != "text":
                raise UserError(
                    f"{where} holds a part of type {short_repr(kind)}; prompts are text only: multimodal data is not "
                    "supported"
                )
            case _:
                raise UserError(f"{where} holds a part that is no text: {short_repr(part)}")
    return "".join(texts)
