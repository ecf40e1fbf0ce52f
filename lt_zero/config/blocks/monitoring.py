"""Blocks of what is shown of a run: operations, collectives, and metrics in files and services."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, SecretStr

from lt_zero.common.fields import Block, Elements, Names, Positive, Real, Whole, key
from lt_zero.core.comm.options import OPERATIONS

# DeepSpeed's documentation writes null for "not given", its code an empty string.
_none_if_empty = BeforeValidator(lambda value: value or None)
_empty_if_none = BeforeValidator(lambda value: "" if value is None else value)
_text = BeforeValidator(lambda value: str(value) if type(value) is int else value)  # YAML: digits are a number


def operation_of(name: str) -> str | None:
    """The operation with this name; None if unknown.

    >>> operation_of("all-gather"), operation_of("all_gather_into_tensor"), operation_of("send")
    ('all_gather', 'all_gather', None)
    """
    name = name.strip().lower().replace("-", "_")
    return next((known for known, others in OPERATIONS.items() if name in (known, *others)), None)


class FlopsProfiler(Block):
    """The ``flops_profiler`` block: a table of one micro-batch, counted by torch's ``FlopCounterMode``."""

    enabled: bool = key(False, "count the floating-point operations of one micro-batch per module")
    profile_step: Elements = key(1, "count the first micro-batch after this many steps; never the first one of a fit")
    module_depth: Annotated[Whole, Field(ge=-1)] = key(
        -1, "levels of modules below the root in both tables; -1: all (DeepSpeed: in the aggregate only)"
    )
    top_modules: Positive = key(1, "number of module classes per level in the aggregate")
    detailed: bool = key(True, "false: print the aggregate only, without a row per module")
    output_file: Annotated[str, _none_if_empty] | None = key(None, "text file that rank 0 writes; null: stdout")
    recompute_fwd_factor: Real = key(0.0, "assumed fraction of forward recomputed in backward, if none was seen", ge=0)


class CommsLogger(Block):
    """The ``comms_logger`` block: time and volume of the engine's collectives."""

    enabled: bool = key(False, "record collectives, print a table after fit (DeepSpeed: true if the block has any key)")
    verbose: bool = key(False, "rank 0 prints each collective when it completes; synchronizes the GPU")
    prof_all: bool = key(True, "record all operations; false: only those in prof_ops")
    debug: bool = key(False, "break down by unit, bucket or purpose")
    prof_ops: Names = key((), "operations to record if prof_all is false: " + ", ".join(OPERATIONS))

    @property
    def operations(self) -> frozenset[str]:
        """Operations that are recorded."""
        if self.prof_all:
            return frozenset(OPERATIONS)
        return frozenset(known for name in self.prof_ops if (known := operation_of(name)) is not None)


class _Monitor(Block):
    enabled: bool = key(
        False,
        "attach this logger unless the Trainer already has one of its kind; it gets the metrics of "
        "steps_per_print, at the Trainer's log_every_n_steps if that is null. In a loop: each step, DeepSpeed's names",
    )


class _Files(_Monitor):
    output_path: Annotated[str, _empty_if_none] = key(
        "", "directory; empty: Trainer(default_root_dir=...), in a loop the current one"
    )
    job_name: str = key(
        "DeepSpeedJobName", "subdirectory; each run of a Trainer gets its own version_<n> there, a loop goes on in it"
    )


class CsvMonitor(_Files):
    """The ``csv_monitor`` block: Lightning's ``CSVLogger``; in a loop a file for each name, as DeepSpeed's."""


class TensorBoard(_Files):
    """The ``tensorboard`` block: Lightning's ``TensorBoardLogger``; in a loop torch's ``SummaryWriter``."""


class Wandb(_Monitor):
    """The ``wandb`` block: Lightning's ``WandbLogger``."""

    group: str | None = key(None, "group of runs that this run belongs to")
    team: str | None = key(None, "entity (user or team) that owns the project; null: the user's default")
    project: str = key("deepspeed", "project that the run is part of")


class Comet(_Monitor):
    """The ``comet`` block: Lightning's ``CometLogger``. Comet's own files and environment set what is null."""

    samples_log_interval: Positive = key(
        100, "in a loop: samples between two values; a Trainer has log_every_n_steps for it, in optimizer steps"
    )
    project: str | None = key(None, "project of the experiment")
    workspace: str | None = key(None, "workspace of the project")
    # excluded from every dump: the configuration is saved with each checkpoint
    api_key: Annotated[SecretStr, _text] | None = key(
        None, "API key; COMET_API_KEY in the environment keeps it out of files", exclude=True
    )
    experiment_name: str | None = key(None, "name of the experiment")
    experiment_key: str | None = key(None, "its id, 32 to 50 letters and digits", pattern="^[A-Za-z0-9]{32,50}$")
    online: bool | None = key(None, "false: an offline experiment; null: true")
    mode: Literal["get", "create", "get_or_create"] | None = key(
        None, "get: continue experiment_key, create: always a new one; null: get_or_create"
    )
