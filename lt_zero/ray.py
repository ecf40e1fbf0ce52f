"""Ray Train: the strategy for its workers, and checkpoints that are reported to it.

Ray starts the workers, numbers them and joins them to torch's process group; then it runs the training function on a
thread of each worker. Checkpoints are written to the storage of the run, which all hosts can read; reports to Ray
name their folder. Ray's own callback writes them to the disk of each host first, and copies them from there.
"""

from __future__ import annotations

import os
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.plugins import ClusterEnvironment
from torch import Tensor
from typing_extensions import override

from lt_zero.common.arguments import expect_number
from lt_zero.common.errors import ConfigError
from lt_zero.training.lightning.checkpoint_plugin import writes_directories
from lt_zero.training.lightning.strategy import ZeroStrategy

try:
    import pyarrow.fs
    import ray.train
    from ray.train import CheckpointUploadMode  # not with RAY_TRAIN_V2_ENABLED=0
    from ray.train.lightning import RayDDPStrategy, RayLightningEnvironment, RayTrainReportCallback
except ImportError as error:
    needed = 'lt_zero.ray needs Ray Train 2.60 or newer (pip install "ray[train]"), without RAY_TRAIN_V2_ENABLED=0'
    raise ImportError(f"{needed}: {error}") from error

# Of a checkpoint inside of one of Ray, as Ray's own callback names it: scripts that resume look for it.
CHECKPOINT_NAME: str = RayTrainReportCallback.CHECKPOINT_NAME
_SCHEMES = {"s3": "s3", "gcs": "gs", "abfs": "abfs", "hdfs": "hdfs"}  # of fsspec, by the kind of pyarrow's file system


class RayZeroStrategy(ZeroStrategy, RayDDPStrategy):  # type: ignore[misc]
    """``ZeroStrategy`` for the workers of Ray's ``TorchTrainer``: ranks, device and process group are Ray's.

    Ray's ``prepare_trainer`` accepts it, and the Trainer needs no ``RayLightningEnvironment`` among its plugins.

    Args:
        arguments, options: those of ``ZeroStrategy``. ``TorchConfig`` of Ray has the backend of the process group, and
            its timeout; ``timeout`` is for the groups that the strategy adds.

    Raises:
        ConfigError: as ``ZeroStrategy``; or an argument says how to start or connect ranks, which Ray does.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        if self._start_method != "popen":
            raise ConfigError.about(
                "start_method",
                f"start_method={self._start_method!r}: Ray starts the workers. Remove it.",
            )
        if self._process_group_backend is not None:
            backend = self._process_group_backend
            raise ConfigError.about(
                "process_group_backend",
                f"process_group_backend={backend!r}: Ray makes the process group. Write "
                f"TorchTrainer(..., torch_config=TorchConfig(backend={backend!r})).",
            )

    @property
    def cluster_environment(self) -> ClusterEnvironment | None:
        """Ray's, whatever launcher Lightning has found around the workers."""
        return self._environment

    @cluster_environment.setter
    def cluster_environment(self, environment: ClusterEnvironment | None) -> None:
        if environment is not None and not isinstance(environment, RayLightningEnvironment):
            environment = RayLightningEnvironment()
        self._environment: ClusterEnvironment | None = environment

    @override
    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        if not self.cluster_environment.creates_processes_externally:
            raise RuntimeError(
                "RayZeroStrategy needs workers that are joined to a process group of torch, and these are not. Start "
                "the training function with ray.train.torch.TorchTrainer(function, scaling_config=...)."
            )
        super()._configure_launcher()

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        hosts = len(self.session.world.nodes)
        if hosts > 1 and writes_directories(self.config, self.checkpoint_io):
            callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
            for callback in callbacks:
                if isinstance(callback, RayTrainReportCallback):
                    raise TypeError(
                        f"{type(callback).__name__} saves to a folder of one host, and the ranks, which write a part "
                        f"of the checkpoint each, are on {hosts} hosts. Use lt_zero.ray.RayZeroReportCallback, which "
                        'saves to the storage of the run, or set checkpoint.format="full".'
                    )
        super().setup(trainer)


class RayZeroReportCallback(pl.Callback):
    """Saves checkpoints to the storage of a run of Ray Train, and reports them with the metrics of the Trainer.

    Each rank writes its part into ``storage_path/name/checkpoint_epoch=<epoch>-step=<step>/checkpoint.ckpt``. Ray gets
    the metrics that were logged, ``epoch`` and ``step``. Its ``CheckpointConfig`` says how many checkpoints stay. With
    ``checkpoint.async`` a checkpoint is reported at the first batch after its save has ended.

    Args:
        every_n_epochs: epochs of training between checkpoints; default: 1, unless ``every_n_train_steps`` is given.
        every_n_train_steps: optimizer steps between checkpoints.

    Raises:
        TypeError, ValueError: an argument is no whole number from 1 on, or both are given. At the beginning of ``fit``:
            the Trainer has another strategy, or this host does not see the storage.
    """

    def __init__(self, every_n_epochs: int | None = None, every_n_train_steps: int | None = None) -> None:
        for name, value in (("every_n_epochs", every_n_epochs), ("every_n_train_steps", every_n_train_steps)):
            if value is not None:
                expect_number(value, f"RayZeroReportCallback({name}=...)", whole=True)
                if value < 1:
                    raise ValueError(f"RayZeroReportCallback({name}={value}): intervals begin with 1.")
        if every_n_epochs is not None and every_n_train_steps is not None:
            raise ValueError(
                f"RayZeroReportCallback(every_n_epochs={every_n_epochs}, every_n_train_steps={every_n_train_steps}): "
                "pass one of the two."
            )
        self._epochs = 1 if every_n_epochs is None and every_n_train_steps is None else every_n_epochs
        self._steps = every_n_train_steps
        self._reported = -1  # step of the last checkpoint
        # Metrics and checkpoint whose save is not known to have ended; the same on all ranks.
        self._pending: tuple[dict[str, Any], Any] | None = None

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if not isinstance(trainer.strategy, RayZeroStrategy):
            raise TypeError(
                f"RayZeroReportCallback saves what RayZeroStrategy shards, and the strategy is "
                f"{type(trainer.strategy).__name__}. Use strategy=RayZeroStrategy(...), or Ray's "
                "RayTrainReportCallback."
            )
        self._pending = None  # an error may have ended the last run
        if stage == "fit":
            _check_storage()

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._reported = trainer.global_step

    @override
    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        # All ranks have agreed on it before this batch.
        if self._pending is not None and _strategy_of(trainer).session.saver.pending is None:
            self._report()

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        step = trainer.global_step
        if self._steps is not None and step % self._steps == 0 and step != self._reported:
            self._save(trainer)

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._epochs is not None and (trainer.current_epoch + 1) % self._epochs == 0:
            self._save(trainer)

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._complete(trainer)

    def _save(self, trainer: pl.Trainer) -> None:
        """Save a checkpoint, and report it now or, if it is saved in the background, later. Collective."""
        self._complete(trainer)
        epoch = trainer.current_epoch
        step = trainer.global_step
        values = {name: value.item() for name, value in trainer.callback_metrics.items() if isinstance(value, Tensor)}
        storage = ray.train.get_context().get_storage()
        folder = f"{storage.experiment_fs_path}/checkpoint_epoch={epoch}-step={step}"
        folder = trainer.strategy.broadcast(_free(folder, storage.storage_filesystem) if trainer.is_global_zero else "")
        checkpoint = ray.train.Checkpoint(folder, storage.storage_filesystem)
        trainer.save_checkpoint(location_of(checkpoint), weights_only=False)
        self._reported = step
        self._pending = {**values, "epoch": epoch, "step": step}, checkpoint
        if _strategy_of(trainer).session.saver.pending is None:
            self._report()

    def _complete(self, trainer: pl.Trainer) -> None:
        """Report the checkpoint that is being saved, once it is complete. Collective."""
        if self._pending is not None:
            _strategy_of(trainer).wait_for_save()
            self._report()

    def _report(self) -> None:
        assert self._pending is not None
        metrics, checkpoint = self._pending
        self._pending = None
        there = CheckpointUploadMode.NO_UPLOAD
        ray.train.report(metrics, checkpoint=checkpoint, checkpoint_upload_mode=there)


def reported_checkpoint() -> str | None:
    """The checkpoint that was reported last: ``trainer.fit(model, ckpt_path=reported_checkpoint())``.

    Each rank then reads its part from the storage; nothing is copied to the disks of the hosts.

    Returns:
        Its path, or URL; None if there is none, as at the first start of a run.
    """
    checkpoint = ray.train.get_checkpoint()
    return None if checkpoint is None else location_of(checkpoint)


def location_of(checkpoint: Any) -> str:
    """The path, or URL, of what ``RayZeroReportCallback`` has saved in a checkpoint of Ray, as ``Result.checkpoint``.

    Raises:
        ValueError: it is in a file system that was made by hand, or of a kind that fsspec does not know.
    """
    place = f"{checkpoint.path.rstrip('/')}/{CHECKPOINT_NAME}"
    if isinstance(checkpoint.filesystem, pyarrow.fs.LocalFileSystem):
        return place
    kind = checkpoint.filesystem.type_name
    if kind not in _SCHEMES:
        raise ValueError(
            f"{checkpoint.path} is in a file system of the kind {kind!r}, for which fsspec has no name. Remove "
            "storage_filesystem of RunConfig, and pass storage_path as a path that all hosts share, or as a URL of "
            f"{', '.join(f'{scheme}://' for scheme in _SCHEMES.values())}."
        )
    return f"{_SCHEMES[kind]}://{place}"


def _free(folder: str, filesystem: Any) -> str:
    """``folder``, with a version if it has a checkpoint: of a run from the start under the name of an earlier one.

    Ray knows each of its checkpoints by the path. What a killed save has left is no checkpoint, and is written over.
    """
    name = folder
    version = 0
    while filesystem.get_file_info(f"{name}/{CHECKPOINT_NAME}").type != pyarrow.fs.FileType.NotFound:
        version += 1
        name = f"{folder}-v{version}"
    return name


def _check_storage() -> None:
    """Check that this host sees the folder of the run, before the first checkpoint is due.

    Raises:
        ValueError: it does not.
    """
    try:
        storage = ray.train.get_context().get_storage()
    except NotImplementedError:
        raise ValueError(
            "ScalingConfig(num_workers=0) trains without a storage, to which RayZeroReportCallback would save. Pass "
            "num_workers=1, or remove the callback."
        ) from None
    local = isinstance(storage.storage_filesystem, pyarrow.fs.LocalFileSystem)
    if local and not os.path.isdir(storage.experiment_fs_path):
        raise ValueError(
            f"RunConfig(storage_path={storage.storage_fs_path!r}) is no folder that all hosts share: rank "
            f"{ray.train.get_context().get_world_rank()} does not see {storage.experiment_fs_path}. Pass a path that "
            "all hosts share (NFS, Lustre), or a URL such as s3://bucket/runs."
        )


def _strategy_of(trainer: pl.Trainer) -> RayZeroStrategy:
    assert isinstance(trainer.strategy, RayZeroStrategy)
    return trainer.strategy
