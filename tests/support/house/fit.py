"""A default fit on two ranks: two layers, AdamW, two steps, a checkpoint. Imports public names only, of any checkout.

``python fit.py OUT LIMIT STAGE:PACKAGE...`` takes a fit for each stage with the package in that folder, from nowhere
else: what an editable install would add is not found. What became of each goes to ``OUT``, a list of JSON: the files of
the package that rank 0 has loaded, and the problem. A fit that has not ended after ``LIMIT`` seconds is a problem.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import socket
import sys
import tempfile
import warnings
from collections.abc import Sequence
from importlib.machinery import BuiltinImporter, FrozenImporter, PathFinder
from pathlib import Path
from typing import Any, NamedTuple

RANKS = 2


class Job(NamedTuple):
    """A fit that is asked for: the stage of ZeRO, and the folder of the package."""

    stage: int
    package: Path


class Outcome(NamedTuple):
    """What became of a fit.

    Attributes:
        files: of the package that rank 0 has loaded, relative to it and without their endings; none if a rank failed.
        problem: what the first rank that failed raised; "" if none did.
    """

    files: list[str]
    problem: str


def default_fit(stage: int, folder: Path) -> None:
    """Train two steps, and save. Collective.

    Args:
        stage: of ZeRO.
        folder: for the checkpoint, the same on all ranks.
    """
    import lightning as L
    import torch
    from torch.utils.data import DataLoader

    from lt_zero import ZeroStrategy

    class Small(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1))

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.net(batch).pow(2).mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    trainer = L.Trainer(
        strategy=ZeroStrategy(stage=stage),
        accelerator="cpu",
        devices=RANKS,
        max_steps=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Small(), DataLoader(torch.randn(16, 8), batch_size=4))
    trainer.save_checkpoint(folder / "last.ckpt")


def only_from(package: Path) -> None:
    """Let this process find ``package`` in its folder only."""
    finders: Sequence[Any] = (BuiltinImporter, FrozenImporter, PathFinder)
    sys.meta_path[:] = [finder for finder in sys.meta_path if finder in finders]
    sys.path.insert(0, str(package.parent))


def loaded_files(package: Path) -> list[str]:
    """The Python files of ``package`` that this process has loaded, relative to it and without their endings."""
    paths = [Path(module.__file__) for module in list(sys.modules.values()) if getattr(module, "__file__", None)]
    inside = {path.relative_to(package) for path in paths if path.suffix == ".py" and path.is_relative_to(package)}
    return sorted(path.with_suffix("").as_posix() for path in inside)


def _rank(rank: int, job: Job, port: int, folder: Path) -> None:
    """Take the fit on one rank, as a launcher would start it; write what this rank has loaded."""
    here = str(rank)
    all_ranks = str(RANKS)
    os.environ.update(RANK=here, LOCAL_RANK=here, WORLD_SIZE=all_ranks, LOCAL_WORLD_SIZE=all_ranks, GROUP_RANK="0")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_RUN_ID="fit")
    only_from(job.package)
    default_fit(job.stage, folder)
    (folder / f"loaded-{rank}.json").write_text(json.dumps(loaded_files(job.package)), encoding="utf-8")


def _forked(rank: int, job: Job, port: int, folder: Path) -> int:
    """The process id of a child that takes the fit and ends, and writes why if it fails."""
    if child := os.fork():
        return child
    status = 1
    try:
        _rank(rank, job, port, folder)
        status = 0
    except BaseException as error:
        (folder / f"problem-{rank}.txt").write_text(f"{type(error).__name__}: {error}", encoding="utf-8")
    finally:
        os._exit(status)  # a process that ran backward with gloo may abort in its destructors


def _late(*_: Any) -> None:
    raise TimeoutError


def take(job: Job, limit: int) -> Outcome:
    """What became of a fit on all ranks, which may take ``limit`` seconds."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        children = {_forked(rank, job, port, folder) for rank in range(RANKS)}
        status = 0
        late = False
        signal.alarm(limit)  # a forked process has none
        try:
            while children and not status:
                child, status = os.wait()
                children.discard(child)
        except TimeoutError:
            late = True
        finally:
            signal.alarm(0)
        for child in children:  # those that wait for a rank which has failed
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        if late:
            return Outcome([], f"It has not ended after {limit} s.")
        if not status:
            return Outcome(json.loads((folder / "loaded-0.json").read_text(encoding="utf-8")), "")
        told = [path.read_text(encoding="utf-8") for path in sorted(folder.glob("problem-*.txt"))]
        return Outcome([], told[0] if told else f"A rank ended with status {status}.")


def main(out: Path, limit: int, jobs: Sequence[Job]) -> None:
    """Write what became of each fit."""
    warnings.simplefilter("ignore")
    gc.disable()  # what is imported lives for ever: nobody needs to look for garbage meanwhile
    # Once, before ranks are forked; the first step of an optimizer imports the last one. The package is not imported.
    import lightning  # noqa: F401
    import torch._dynamo  # noqa: F401

    gc.freeze()
    gc.enable()
    signal.signal(signal.SIGALRM, _late)
    out.write_text(json.dumps([take(job, limit) for job in jobs]), encoding="utf-8")


if __name__ == "__main__":
    given = [argument.partition(":") for argument in sys.argv[3:]]
    main(Path(sys.argv[1]), int(sys.argv[2]), [Job(int(stage), Path(package)) for stage, _, package in given])
