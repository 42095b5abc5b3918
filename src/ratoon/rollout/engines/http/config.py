"""Which server generates, who starts it, and how long anything of it may take."""

import re
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from ratoon.types.limits import MAX_REPEATS

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class ServerConfig(BaseModel):
    """The `[rollout.server]` table of a recipe: of the engines `vllm-server` and `sglang-server`."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    url: str | None = None
    """Of a server that runs already, such as `"http://127.0.0.1:8000"`; it is neither started nor stopped. It must have
    the recipe's model, and see `transfer_folder` under the same path. Give this or `command`."""

    command: tuple[str, ...] = ()
    """Starts the server with the run and ends it with it, such as
    `["/opt/vllm/bin/python", "-m", "vllm.entrypoints.openai.api_server"]`. Model, address and what log-probs need are
    added; put options of your own behind it. Relative to the folder the command is started in."""

    environment: tuple[str, ...] = ()
    """Environment variables of a started server, as `"NAME=value"`; it has those of the run besides."""

    restarts: int = Field(default=0, ge=0, le=MAX_REPEATS)
    """How often in a run a server of `command` that dies is started again. Responses then go on from the tokens that
    they have, though not by the draws that they would have had. 0: its death ends the run."""

    ready_timeout_s: float = Field(default=900.0, gt=0, le=604_800, allow_inf_nan=False)
    """Seconds a server of `command` may take until it serves."""

    request_timeout_s: float = Field(default=60.0, gt=0, le=604_800, allow_inf_nan=False)
    """Seconds any request that does not generate may take, and the connection of one that does."""

    transfer_folder: str | None = None
    """Where new weights are written for the server to read: a folder that both see, with room for two copies. Absent: a
    temporary folder in memory (`/dev/shm`) where there is one with the room, else on disk."""

    max_probe_gap: float = Field(default=0.05, gt=0, allow_inf_nan=False)
    """Nats. After every update the server and the trainer score the same few tokens; a larger mean difference of their
    log-probs ends the run and says what it looks like."""

    api_key_variable: str | None = None
    """Name of the environment variable that holds the API key of the server at `url`. The key itself is never written
    down."""

    @field_validator("url")
    @classmethod
    def _is_an_address(cls, url: str | None) -> str | None:
        if url is None:
            return None
        parts = urlsplit(url)
        if "@" in parts.netloc:
            raise ValueError("names a user or a password, which would be written down; use api_key_variable")
        is_plain = parts.scheme in ("http", "https") and parts.hostname and not (parts.query or parts.fragment)
        if not is_plain or parts.port == 0 or any(letter <= " " for letter in url):  # a bad port raises ValueError
            raise ValueError(f"must be like 'http://127.0.0.1:8000', got {url!r}")
        return url.rstrip("/")

    @field_validator("environment")
    @classmethod
    def _names_and_values(cls, environment: tuple[str, ...]) -> tuple[str, ...]:
        for entry in environment:
            name, equals, _ = entry.partition("=")
            if not equals or not _VARIABLE.fullmatch(name):
                raise ValueError(f"entries must be like 'NAME=value', got {entry!r}")
        return environment

    @field_validator("api_key_variable")
    @classmethod
    def _is_a_name(cls, name: str | None) -> str | None:
        if name is not None and not _VARIABLE.fullmatch(name):
            # The value is not shown: it may be the key.
            raise ValueError("must be the name of an environment variable (letters, digits, _), not the key")
        return name

    @model_validator(mode="after")
    def _what_is_set_acts(self) -> "ServerConfig":
        if self.url is not None and self.command:
            raise ValueError("url is of a server that runs already and command starts one; give one of them")
        if not self.command:
            for key in ("environment", "restarts"):
                if getattr(self, key):
                    raise ValueError(f"{key} acts on a server that command starts, and there is no command")
        elif self.api_key_variable is not None:
            raise ValueError("api_key_variable is for a server at url; one that command starts has no key")
        return self

    @property
    def is_given(self) -> bool:
        return self.url is not None or bool(self.command)
