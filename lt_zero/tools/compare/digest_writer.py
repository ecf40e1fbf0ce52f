"""``LT_ZERO_DIGESTS``: writes a digest of the weights after each step. The file: digests.py."""

from __future__ import annotations

import json
import os
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from lt_zero.common.errors import ConfigError
from lt_zero.common.users_code import warn
from lt_zero.config import ZeroConfig
from lt_zero.core.engine.engine import Engine
from lt_zero.core.engine.weights_digest import digest_of
from lt_zero.core.stores.regular_file import open_for_update
from lt_zero.tools.compare.digests import DIGESTS, VERSION
from lt_zero.training.run_file import cut_incomplete_line


class DigestFile:
    """A file of lines, which a run begins or goes on with.

    Raises:
        OSError: it is no regular file, or cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        cut_incomplete_line(path)
        os.close(self._open())

    def _open(self) -> int:
        return open_for_update(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def append(self, **fields: Any) -> None:
        """Write a line. Raises OSError: as the class."""
        with open(self._open(), "a", encoding="utf-8") as file:
            file.write(json.dumps(fields) + "\n")


class DigestWriter:
    """Writes the digest of an engine's weights after each step that is taken, on rank 0.

    An error of the file system ends the file, with a warning, not the run.

    Args:
        engine: of the module.
        path: of the file.
        config: of the run.

    Raises:
        ConfigError: on all ranks: the file cannot be written.

    Attributes:
        steps: optimizer steps so far, which checkpoints have.
    """

    def __init__(self, engine: Engine, path: Path, config: ZeroConfig) -> None:
        self._engine = weakref.ref(engine)
        self._path = path
        self._stage = config.zero_optimization.stage
        self._begun = False
        self._file: DigestFile | None = None  # on rank 0, as long as it can be written
        self.steps = 0
        with engine.world.agree("opening the file of digests", ConfigError):
            if engine.world.rank == 0:
                self._open()
        engine.after_step.append(self._stepped)

    def _open(self) -> None:
        try:
            self._file = DigestFile(self._path)
        except OSError as error:
            reason = error.strerror or error
            text = f"{DIGESTS}={self._path.parent} cannot be written: {reason}. Name another folder."
            raise ConfigError(text) from None

    def state_dict(self) -> dict[str, int]:
        return {"steps": self.steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.steps = int(state["steps"])
        self._begun = False  # a load in the middle of a run may go back: the next line is a start

    def remove(self) -> None:
        """End the file with the engine."""
        if (engine := self._engine()) is not None:
            engine.after_step.remove(self._stepped)

    def _stepped(self) -> None:
        engine = self._engine()
        if engine is None:
            return
        if not self._begun:
            self._begun = True
            about = {"ranks": engine.world.size, "stage": self._stage, "mode": engine.policy.mode}
            self._write(kind="start", version=VERSION, at=self.steps, **about, torch=torch.__version__)
        self.steps += 1
        self._write(kind="step", at=self.steps, digest=digest_of(engine))

    def _write(self, **fields: Any) -> None:
        if self._file is None:
            return
        try:
            self._file.append(**fields)
        except OSError as error:
            self._file = None
            reason = error.strerror or error
            warn(f"{self._path} cannot be written ({reason}): digests end before step {self.steps}.")
