"""The ``checkpoint`` block."""

from __future__ import annotations

from typing import Literal

from pydantic import AliasChoices, Field

from lt_zero.config.fields import Block


class Checkpoint(Block):
    """How training states are saved and restored."""

    format: Literal["auto", "sharded", "full"] = Field(
        "auto", description="sharded: a directory that all ranks write; full: one file by rank 0; auto: full at stage 0"
    )
    async_save: bool = Field(
        False,
        validation_alias=AliasChoices("async", "async_save"),
        description="copy to host memory and write in the background while training continues (sharded only)",
    )
    save_frozen: bool = Field(True, description="false: leave out parameters that need no gradient")
    load_module_only: bool = Field(False, description="fit(ckpt_path=...) loads the weights only and starts a new run")
    load_optimizer_states: bool = Field(True, description="false: fit(ckpt_path=...) starts with fresh optimizers")
    load_lr_scheduler_states: bool = Field(True, description="false: fit(ckpt_path=...) starts with fresh schedules")
