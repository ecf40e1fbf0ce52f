"""``stage3_gather_16bit_weights_on_model_save``: one file of all weights in 16 bits beside each checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch

from lt_zero.checkpoint.export import export
from lt_zero.checkpoint.live_weights import export_engine, kept_names
from lt_zero.checkpoint.native.archive import Archive
from lt_zero.checkpoint.native.directory import is_url
from lt_zero.common.errors import CheckpointError
from lt_zero.training.lightning.setup import RunSnapshot


class WeightsBeside:
    """The files of one run: ``<name>-fp16.pt`` or ``<name>-bf16.pt`` beside the checkpoint ``<name>.ckpt``.

    There is none beside checkpoints of SLURM's requeue.
    """

    def __init__(self, run: RunSnapshot) -> None:
        self._run = run
        bf16 = run.built is not None and run.built.policy.compute == torch.bfloat16
        self._dtype = torch.bfloat16 if bf16 else torch.float16
        self._suffix = "bf16" if bf16 else "fp16"

    def check(self, path: str) -> None:
        """Check the path of a checkpoint before anything is written.

        Raises:
            CheckpointError: the checkpoint is at a URL.
        """
        self._file(path)

    def writer(self) -> Callable[[str], None]:
        """A function that writes the file from a saved directory, in any thread. Collective if modules differ."""
        return partial(self._write_from, kept_names(self._run.engine))

    def write(self, path: str) -> None:
        """Write the file from the weights of the run. Collective."""
        if (file := self._file(path)) is not None:
            export_engine(self._run.engine, file, self._dtype)

    def remove(self, path: str) -> None:
        """Remove the file beside a checkpoint at a local path."""
        if not is_url(path) and (file := self._file(path)) is not None:
            file.unlink(missing_ok=True)

    def _write_from(self, kept: Sequence[str], path: str) -> None:
        if (file := self._file(path)) is not None:
            export(Archive(path), file, self._dtype, keep_fp32=kept, strip_prefix="")

    def _file(self, path: str) -> Path | None:
        if Path(path).name.startswith("hpc_ckpt_"):
            # Such a checkpoint is for a requeue alone, and Lightning takes any file of that name for one.
            return None
        if is_url(path):
            raise CheckpointError(
                f"stage3_gather_16bit_weights_on_model_save writes a local file, and {path} is a URL: set it to false "
                "and use `lt-zero export`."
            )
        return Path(path).with_name(f"{Path(path).name.removesuffix('.ckpt')}-{self._suffix}.pt")
