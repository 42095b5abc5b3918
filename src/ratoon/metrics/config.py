"""Where measurements may go beside metrics.jsonl."""

import re
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

SinkName = Literal["tensorboard", "wandb", "trackio"]


class LoggingConfig(BaseModel):
    """Copies of metrics.jsonl in other tools; none of them can stop or slow down a run."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    sinks: tuple[SinkName, ...] = ()
    """Tools that get every number of metrics.jsonl as PHASE/NAME, such as `train/reward_mean`. Each is an extra:
    `pip install -e ".[wandb]"` in the
    clone of Ratoon. Their own environment variables hold (WANDB_MODE, TRACKIO_DIR, ...)."""

    project: str = "ratoon"
    """The project in wandb and trackio under which the run stands, by its name."""

    entity: str | None = None
    """The wandb team or user; absent: wandb's own default."""

    group: str | None = None
    """Runs of one group stand together in wandb and trackio."""

    tensorboard_dir: str | None = None
    """The run's event files go to a folder of its name in here, so that TensorBoard compares the runs of one folder.
    Absent: to `tensorboard/` in the run's own folder."""

    timeout_s: float = Field(default=30.0, gt=0, le=86_400)
    """How long the end of a run waits for a sink to send what it still holds; one that takes longer is ended."""

    @field_validator("sinks")
    @classmethod
    def _are_different(cls, sinks: tuple[SinkName, ...]) -> tuple[SinkName, ...]:
        if len(set(sinks)) < len(sinks):
            raise ValueError("each sink may be named once")
        return sinks

    @field_validator("project")
    @classmethod
    def _is_a_name(cls, project: str) -> str:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", project):
            raise ValueError("must be a name of up to 100 letters, digits, '.', '_' and '-'")
        return project
