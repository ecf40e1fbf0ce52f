"""The blocks ``csv_monitor``, ``tensorboard``, ``wandb`` and ``comet``: where metrics are written."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, SecretStr

from lt_zero.config.fields import Block, PositiveElements


def _path(value: Any) -> Any:
    """DeepSpeed's documentation writes null for "not given", its code an empty string."""
    return "" if value is None else value


def _text(value: Any) -> Any:
    """A key of digits only reads as a number from YAML; an error would show it."""
    return str(value) if isinstance(value, int) else value


class _Monitor(Block):
    enabled: bool = Field(
        False,
        description="attach this logger unless the Trainer already has one of its kind; it gets the metrics of "
        "steps_per_print, at the Trainer's log_every_n_steps if that is null",
    )


class _Files(_Monitor):
    output_path: Annotated[str, BeforeValidator(_path)] = Field(
        "", description="directory; empty: Trainer(default_root_dir=...)"
    )
    job_name: str = Field("DeepSpeedJobName", description="subdirectory; each run gets its own version_<n> there")


class CsvMonitor(_Files):
    """The ``csv_monitor`` block: Lightning's ``CSVLogger``."""


class TensorBoard(_Files):
    """The ``tensorboard`` block: Lightning's ``TensorBoardLogger``."""


class Wandb(_Monitor):
    """The ``wandb`` block: Lightning's ``WandbLogger``."""

    group: str | None = Field(None, description="group of runs that this run belongs to")
    team: str | None = Field(None, description="entity (user or team) that owns the project; null: the user's default")
    project: str = Field("deepspeed", description="project that the run is part of")


class Comet(_Monitor):
    """The ``comet`` block: Lightning's ``CometLogger``. Comet's own files and environment set what is null."""

    samples_log_interval: PositiveElements = Field(
        100, description="accepted, no effect; Trainer(log_every_n_steps=...) sets the interval, in optimizer steps"
    )
    project: str | None = Field(None, description="project of the experiment")
    workspace: str | None = Field(None, description="workspace of the project")
    # excluded from every dump: the configuration is saved with each checkpoint
    api_key: Annotated[SecretStr, BeforeValidator(_text)] | None = Field(
        None, exclude=True, description="API key; COMET_API_KEY in the environment keeps it out of files"
    )
    experiment_name: str | None = Field(None, description="name of the experiment")
    experiment_key: str | None = Field(
        None, pattern="^[A-Za-z0-9]{32,50}$", description="id of the experiment, 32 to 50 letters and digits"
    )
    online: bool | None = Field(None, description="false: an offline experiment; null: true")
    mode: Literal["get", "create", "get_or_create"] | None = Field(
        None, description="get: continue experiment_key, create: always a new one; null: get_or_create"
    )
