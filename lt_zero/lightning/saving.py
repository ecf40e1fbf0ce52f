"""Saving checkpoints in ``ZeroStrategy``.

Note [Life of a save]
    ``dump_checkpoint`` collects the module's and the optimizers' states as fragments, without copies. Then ``save``
    writes them (checkpoint/native/save.py). With ``checkpoint.async`` it copies them to host memory and a thread
    writes while training continues. At most one save is pending; older checkpoints are removed only after it succeeds.
    All ranks check the outcome at the beginning of each training step.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch import LightningModule
from lightning.pytorch.trainer.states import TrainerStatus
from omegaconf import Container
from torch import Tensor
from torch.optim import Optimizer

from lt_zero.checkpoint.export import export
from lt_zero.checkpoint.live_weights import export_engine
from lt_zero.checkpoint.native.archive import Archive
from lt_zero.checkpoint.native.collect import optimizer_fragments, parameter_names, weight_fragments
from lt_zero.checkpoint.native.directory import Place, is_url, remove
from lt_zero.checkpoint.native.full_states import full_optimizer_state
from lt_zero.checkpoint.native.plain import plain, put_back
from lt_zero.checkpoint.native.save import KEY, Bundle, bundle, stage, write
from lt_zero.common.errors import CheckpointError
from lt_zero.common.progress_bar import progress_bar
from lt_zero.config.show import resolved
from lt_zero.engine.full_params import full_state_dict
from lt_zero.lightning.data_position.position import KEY as PROGRESS
from lt_zero.lightning.precision import sharded_of

if TYPE_CHECKING:
    from lt_zero.lightning.checkpoint_service import CheckpointingStrategy

GRACE = 15.0  # seconds to wait for the pending save after an error; tests replace this
_HPARAMS, _HPARAMS_TYPE = LightningModule.CHECKPOINT_HYPER_PARAMS_KEY, LightningModule.CHECKPOINT_HYPER_PARAMS_TYPE


class Persistence:
    """Saves for one strategy."""

    def __init__(self, strategy: CheckpointingStrategy) -> None:
        self._strategy = strategy
        self._frozen: list[str] = []  # names left out of the last state dict
        self._thread: ThreadPoolExecutor | None = None
        self._pending: Future[None] | None = None
        self._after: list[str] = []  # checkpoints to remove when the pending save is done
        self._buffer: Tensor | None = None
        self._waits = False  # see ``foreground``

    @property
    def sharded(self) -> bool:
        """Whether checkpoints are directories."""
        strategy, how = self._strategy, self._strategy.config.checkpoint.format
        stock = type(strategy.checkpoint_io) is TorchCheckpointIO
        if how == "sharded" and not stock:
            raise ValueError(
                f'checkpoint.format="sharded" does not write through {type(strategy.checkpoint_io).__name__}. Remove '
                'that plugin, or set checkpoint.format="full".'
            )
        return strategy.config.sharded_checkpoints and stock

    # ---- what Lightning asks for ---------------------------------------------------------------------------------

    def model_state(self) -> dict[str, Any]:
        """The module's state dict: fragments on all ranks, or full tensors on rank 0. Collective."""
        engine = self._strategy.engine
        self._strategy.zero_precision.loss_scale_controller.read_skip_flag()  # schedules are saved next
        state = weight_fragments(engine) if self.sharded else full_state_dict(engine)
        self._frozen = []
        if not self._strategy.config.checkpoint.save_frozen:
            every = engine.root.named_parameters(remove_duplicate=False)  # by all names of tied ones
            self._frozen = [name for name, p in every if not p.requires_grad]
            state = {name: value for name, value in state.items() if name not in set(self._frozen)}
        return state

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any] | None:
        """An optimizer's state: fragments on all ranks, or full tensors on rank 0; None if nothing is sharded."""
        sharded = sharded_of(optimizer)
        if sharded is None:
            return None
        self._strategy.zero_precision.loss_scale_controller.read_skip_flag()
        return optimizer_fragments(sharded) if self.sharded else full_optimizer_state(sharded)

    def with_progress(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """The checkpoint with random states and data positions of all ranks added. Collective.

        Returns a new dict, as callbacks may have kept the one passed to their hooks.
        """
        comm = self._strategy.comm
        if comm is None or "optimizer_states" not in checkpoint:
            return checkpoint
        return {**checkpoint, PROGRESS: comm.host_gather(self._strategy.progress.state_dict(), "random states")}

    # ---- saving --------------------------------------------------------------------------------------------------

    def save(self, checkpoint: dict[str, Any], path: str) -> None:
        """Write Lightning's checkpoint as a directory. Collective.

        Raises:
            CheckpointError: on all ranks; an earlier checkpoint at ``path`` is kept.
        """
        self.wait()
        self._beside(path)  # refuses a URL before anything is written
        strategy = self._strategy
        engine, config = strategy.engine, strategy.config
        names = [parameter_names(o, engine) for o in strategy.optimizers]
        how = config.zero_optimization
        run = {
            "stage": how.stage,
            "ranks": engine.comm.world,
            "precision": strategy.zero_precision.precision,
            "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "torch": str(torch.__version__),
        }
        made = bundle(_without_type(checkpoint), names, engine.comm, run, resolved(config), self._frozen)
        place = self._make(path)
        if not (config.checkpoint.async_save and self._may_go_on()):
            with progress_bar(f"Saving {path}", made.nbytes, rank=engine.comm.rank, in_bytes=True) as work:
                self._write(made, place, engine.comm.saving_group(background=False), work.advance)
            return
        with engine.comm.agree("copying the state for an asynchronous save", CheckpointError):
            self._buffer = stage(made, self._buffer)
        group = engine.comm.saving_group(background=True)
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="lt_zero-async-save")
        self._pending = self._thread.submit(self._write, made, place, group)

    def save_full(self, checkpoint: dict[str, Any], path: str) -> dict[str, Any]:
        """The checkpoint in plain containers where possible, for a single file at ``path``."""
        self._beside(path)  # refuses a URL before anything is written
        content, rest = plain(_without_type(checkpoint))
        put_back(content, rest)
        content.setdefault(KEY, {})["config"] = resolved(self._strategy.config)
        if self._frozen:
            content[KEY]["frozen_left_out"] = list(self._frozen)
        assert isinstance(content, dict)
        return content

    @contextmanager
    def foreground(self) -> Iterator[None]:
        """Context in which saves are synchronous."""
        self._waits = True
        try:
            yield
        finally:
            self._waits = False

    def _may_go_on(self) -> bool:
        """Whether to save in the background: not when the process is about to end."""
        module = self._strategy.lightning_module
        trainer = module._trainer if module is not None else None
        ends = trainer is None or trainer.state.status == TrainerStatus.INTERRUPTED
        return trainer is not None and trainer.training and not ends and not self._waits

    def _make(self, path: str) -> Place:
        """The directory to write to, visible to all ranks. Collective."""
        comm = self._strategy.engine.comm
        place, problem, facts = None, None, None
        try:
            if comm.rank == 0:
                place = Place.make(path)
                facts = (place.name, place.folder, place.token())
        except Exception as error:  # any error of the path or file system: the other ranks are waiting
            problem = str(error) if isinstance(error, CheckpointError) else f"Cannot save to {path!r}: {error!r}."
        facts = comm.host_broadcast(facts, "checkpoint directory")
        if facts is not None and place is None:
            place = Place(facts[0], facts[1])
            try:
                seen = place.token()
                problem = None if seen == facts[2] else f"{place.folder} is not the directory that rank 0 created."
            except CheckpointError as error:
                problem = str(error)
        if found := comm.problems(problem, "checkpoint directory"):
            if comm.rank == 0 and place is not None:
                place.discard()
            raise CheckpointError(" ".join(found))
        assert place is not None
        return place

    def _write(self, made: Bundle, place: Place, group: Any, tick: Callable[[int], object] = lambda _: None) -> None:
        comm = self._strategy.engine.comm
        try:
            with comm.explaining():
                write(made, place, comm, group, lambda: self._export_saved(place.name), tick)
        except BaseException:
            if comm.rank == 0:
                place.discard()
            raise

    # ---- one file with all weights beside each checkpoint ----------------------------------------------------------

    def _beside(self, path: str) -> tuple[Path, torch.dtype] | None:
        """The file of ``stage3_gather_16bit_weights_on_model_save``, or None."""
        strategy = self._strategy
        if not strategy.config.zero_optimization.stage3_gather_16bit_weights_on_model_save:
            return None
        if is_url(path):
            raise CheckpointError(
                f"stage3_gather_16bit_weights_on_model_save writes a local file, and {path} is a URL: set it to false "
                "and use `lt-zero export`."
            )
        dtype = torch.bfloat16 if strategy.zero_precision.policy.compute == torch.bfloat16 else torch.float16
        return beside(path, dtype), dtype

    def _export_saved(self, path: str) -> None:
        """Write it from the saved directory, without gathering. On rank 0, in any thread."""
        if (found := self._beside(path)) is not None:
            target, dtype = found
            kept = {id(p) for p in self._strategy.engine.kept}
            names = [name for name, p in self._strategy.engine.root.named_parameters() if id(p) in kept]
            export(Archive(path), target, dtype, keep_fp32=names, strip_prefix="")

    def export_beside(self, path: str) -> None:
        """Write it after a full checkpoint. Collective."""
        if self._strategy.built is not None and (found := self._beside(path)) is not None:
            export_engine(self._strategy.engine, *found)

    # ---- saves in the background -----------------------------------------------------------------------------------

    def tick(self) -> None:
        """Check whether the pending save, if any, has ended. Collective.

        Raises:
            CheckpointError: on all ranks: it failed.
        """
        if self._pending is None:
            return
        running = torch.tensor([not self._pending.done()], dtype=torch.uint8)
        self._strategy.engine.comm.host_max(running, "save in the background").wait()
        if not running.item():
            self.wait()

    def wait(self) -> None:
        """Wait for the pending save, if any. Collective.

        Raises:
            CheckpointError: on all ranks: it failed.
        """
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        after, self._after = self._after, []
        with progress_bar("Waiting for the save in the background", rank=self._strategy.global_rank):
            pending.result()  # raises on all ranks if one failed
        for path in after:
            self.remove(path)

    def abandon(self) -> None:
        """Clean up after an error without waiting long: other ranks may be gone."""
        ended = True
        if self._pending is not None and self._strategy.comm is not None:
            with progress_bar("Waiting for the save in the background", rank=self._strategy.global_rank):
                ended = bool(futures.wait([self._pending], GRACE).done)
            if not ended:
                self._strategy.comm.leave_saving_group()  # owned by the save, which may still be running
        self._pending, self._after = None, []
        if self._thread is not None:
            self._thread.shutdown(wait=ended, cancel_futures=True)
        self._thread = self._buffer = None

    def close(self) -> None:
        """Wait for the pending save; release threads and memory. Collective."""
        with suppress(CheckpointError):  # `wait` was called earlier, where it can raise
            self.wait()
        if self._thread is not None:
            self._thread.shutdown()
        self._thread = self._buffer = None

    def remove(self, path: str) -> None:
        """Remove a checkpoint, after the pending save if any: it may be the last good one."""
        if self._pending is not None:
            self._after.append(path if is_url(path) else os.path.abspath(path))
        elif self._strategy.is_global_zero:
            remove(path) if os.path.isdir(path) else self._strategy.checkpoint_io.remove_checkpoint(path)
            if not is_url(path) and (found := self._beside(path)) is not None:
                found[0].unlink(missing_ok=True)


def beside(path: str, dtype: torch.dtype) -> Path:
    """The path of the file with all weights next to a checkpoint.

    >>> beside("runs/last.ckpt", torch.float16).name
    'last-fp16.pt'
    """
    name = "bf16" if dtype == torch.bfloat16 else "fp16"
    return Path(path).with_name(f"{Path(path).name.removesuffix('.ckpt')}-{name}.pt")


def _without_type(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """Convert OmegaConf containers to plain ones."""
    made = dict(checkpoint)
    made.pop(_HPARAMS_TYPE, None)
    if isinstance(made.get(_HPARAMS), Container):
        made[KEY] = {**made.get(KEY, {}), "hparams": "omegaconf"}
    return made
