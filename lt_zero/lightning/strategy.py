"""``ZeroStrategy``: the engine behind Lightning's Trainer."""

from __future__ import annotations

import os
from collections.abc import Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.pytorch.accelerators import Accelerator, CPUAccelerator
from lightning.pytorch.plugins import Precision, TorchSyncBatchNorm
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lt_zero.activation.install import install, installed, uninstall
from lt_zero.build import shard
from lt_zero.comm.collective_check import debug_enabled
from lt_zero.common.timing import phase
from lt_zero.config import ZeroConfig
from lt_zero.config.blocks.activation import ActivationCheckpointing
from lt_zero.config.load import load
from lt_zero.engine.consistency_check import sync_buffers
from lt_zero.engine.engine import Engine
from lt_zero.engine.full_params import restore_whole
from lt_zero.engine.materialize import ConstructionSharder
from lt_zero.lightning import setup as set_up
from lt_zero.lightning.model_report import memory_report
from lt_zero.lightning.monitor.run_monitor import MonitoredStrategy
from lt_zero.lightning.precision import ZeroPrecision, sharded_of
from lt_zero.lightning.reconcile import Reconciler
from lt_zero.lightning.same_config import check_same
from lt_zero.lightning.signals import Signals
from lt_zero.memory.check import check_optimizers
from lt_zero.step.clip import grad_norm

DEFAULT_TIMEOUT = timedelta(minutes=30)


class ZeroStrategy(MonitoredStrategy):
    """Trains with optimizer states, gradients and parameters sharded over the ranks (ZeRO, arXiv:1910.02054).

    Args:
        stage: 0 shards nothing, 1 optimizer states, 2 also gradients, 3 also parameters (default: the config's, or 3).
        config: keys of a DeepSpeed configuration: the path of a JSON or YAML file, a mapping, or a ``ZeroConfig``.
        overrides: ``key=value`` and ``group=option`` in Hydra's grammar, applied to ``config``.
        accelerator, parallel_devices, cluster_environment, checkpoint_io, precision_plugin: as in every strategy.
        process_group_backend: ``gloo`` on CPU and ``nccl`` on CUDA by default.
        timeout: of collectives on the default process group.
        start_method: ``popen``, or ``spawn``, ``fork``, ``forkserver`` for multiprocessing and notebooks.
        activation_checkpointing: what backward recomputes: "full" or True for everything inside the model's repeated
            blocks, "selective", "none", or keys of that block of the configuration, which must not contradict it.

    Raises:
        ConfigError: names every problem: unknown keys, wrong values, keys that contradict each other.
    """

    def __init__(
        self,
        stage: int | None = None,
        # In this order: jsonargparse tries the mapping first.
        config: Mapping[str, Any] | ZeroConfig | str | os.PathLike[str] | None = None,
        overrides: Sequence[str] = (),
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = DEFAULT_TIMEOUT,
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
        activation_checkpointing: Mapping[str, Any]
        | ActivationCheckpointing
        | Literal["none", "full", "selective"]
        | bool
        | None = None,
    ) -> None:
        default = 3 if config is None else None
        self.config, loaded = load(config, stage, overrides, default, activation_checkpointing)
        loaded.announce()
        self._reconciler = Reconciler(self.config, loaded.marks)
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
            process_group_backend=process_group_backend,
            timeout=timeout,
            start_method=start_method,
        )

    _of_a_run = MonitoredStrategy._of_a_run | {"_signals"}

    @override
    def _begin(self) -> None:
        super()._begin()
        self._signals: Signals | None = None  # of the run

    # ---- what the user can ask ---------------------------------------------------------------------------------

    @property
    def stage(self) -> int:
        return self.config.zero_optimization.stage

    def memory_report(self) -> dict[str, tuple[int, int]]:
        """Bytes of model states per kind: (on this rank now, what a replicated run holds)."""
        return memory_report(self.engine, [s for s in map(sharded_of, self.optimizers) if s is not None])

    def grad_norm(self, optimizer: Optimizer | None = None, norm_type: float = 2.0) -> Tensor:
        """The global norm (0D) of the averaged gradients; after backward and before the step. Collective."""
        sharded = sharded_of(optimizer if optimizer is not None else self.optimizers[0])
        if sharded is None:
            raise ValueError("The optimizer has no parameters of this model.")
        sharded.engine.comm.roll_call("grad_norm")
        return grad_norm(sharded, norm_type) / sharded.loss_scale

    # ---- precision ---------------------------------------------------------------------------------------------

    @property
    @override
    def precision_plugin(self) -> ZeroPrecision:
        if self._precision_plugin is None:
            self.precision_plugin = ZeroPrecision()
        assert isinstance(self._precision_plugin, ZeroPrecision)
        return self._precision_plugin

    @precision_plugin.setter
    @override
    def precision_plugin(self, precision_plugin: Precision | None) -> None:
        self._precision_plugin = None
        if precision_plugin is not None:
            plugin = ZeroPrecision.of(precision_plugin)
            plugin.configure(self.config, device_type="cpu" if isinstance(self.accelerator, CPUAccelerator) else "cuda")
            self._precision_plugin = plugin

    # ---- set-up ------------------------------------------------------------------------------------------------

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        if self._comm is None:
            check = debug_enabled() or self.config.zero_optimization.enable_sanity_checks
            self._comm = self.comm_class.for_world(self.root_device, check=check)
            self.log_comms()
            check_same(self.config, self._comm)
        self._comm.begin_run()

    @override
    def connect(self, model: pl.LightningModule) -> None:
        super().connect(model)
        self._reconciler.lend_optimizers(model)

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        assert self.accelerator is not None
        assert self.lightning_module is not None
        assert self._comm is not None
        self.accelerator.setup(trainer)
        set_up.check_callbacks(trainer, self.stage)
        fitting = trainer.state.fn == TrainerFn.FITTING
        if fitting:
            self.config = self._reconciler.agree(trainer, self.lightning_module, self._comm, self.is_global_zero)
        if self.config.zero_optimization.sync_bn_in_backward and self._layer_sync is None:
            self._layer_sync = TorchSyncBatchNorm()
        if fitting and self._layer_sync:
            self.model = self._layer_sync.apply(self.lightning_module)
        self.precision_plugin.convert_module(self.lightning_module)
        self.model_to_device()
        before = self._engine
        self._engine = self._find_or_build(self.lightning_module, fitting)
        plugin = self.precision_plugin
        plugin.engine, plugin.device_type = self._engine, self.root_device.type
        if fitting:
            self.progress.watch(trainer)
            self.setup_optimizers(trainer)
            set_up.announce_offload(self.engine, self.optimizers)
            plugin.loss_scale_controller.start_watching(self._engine)
            self.start_monitoring(self._engine is not before)
        self.setup_precision_plugin()
        self._signals = Signals(trainer, self._comm.agreement)

    def _find_or_build(self, module: pl.LightningModule, fitting: bool) -> Engine:
        policy = self.precision_plugin.policy
        if (engine := set_up.find_engine(module, self.config, policy, self._engine)) is not None:
            self.restoring.load_late()
            if fitting and installed(engine) is None and install(engine) is not None:
                set_up.show_checkpointing(engine)
            return engine
        engine = shard(module, self.config, self.root_device, policy, self._comm, fitting)
        self._engine = engine
        self.restoring.load_late()
        sync_buffers(engine)
        set_up.show_tables(engine)
        return engine

    @override
    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        self._reset_optimizers_and_schedulers()  # those of an earlier run refer to freed fragments
        self._reconciler.lend_optimizers(trainer.lightning_module)
        super().setup_optimizers(trainer)
        self._reconciler.take_back()  # copies of the module made during training must not contain our hook
        loss_scale = self.precision_plugin.loss_scale_controller
        set_up.shard_optimizers(self.engine, self.optimizers, loss_scale)
        accumulates, saves = trainer.accumulate_grad_batches > 1, bool(trainer.checkpoint_callbacks)
        check_optimizers(self.engine, self.optimizers, accumulates, saves)
        if self.config.on_skipped_step != "advance":
            set_up.hold_schedules(self.lr_scheduler_configs, self.optimizers, loss_scale)

    @override
    def model_to_device(self) -> None:
        """Move buffers and metrics only; parameters move bucket by bucket when sharded."""
        assert self.lightning_module is not None
        set_up.move_buffers(self.lightning_module, self.root_device)

    @override
    def configure_ddp(self) -> None:
        """No wrapper: the engine hooks the module itself."""

    @contextmanager
    @override
    def tensor_init_context(self, empty_init: bool | None = None) -> Generator[None, None, None]:
        # Allocate nothing on the meta device; set-up fills the parameters unit by unit.
        # Otherwise construction stays on the CPU, as without a strategy: same random numbers, no full copy on a GPU.
        device: AbstractContextManager[Any] = torch.device("meta") if empty_init else nullcontext()
        trainer = self.lightning_module._trainer if self.lightning_module is not None else None
        only_runs = trainer is not None and (trainer.validating or trainer.testing or trainer.predicting)
        with device, self.precision_plugin.init_context(trains=not only_runs):
            yield

    @contextmanager
    @override
    def model_sharded_context(self) -> Generator[None, None, None]:
        if self.stage < 3 or self._comm is None or self._comm.world == 1:
            yield
            return
        threshold = self.config.zero_optimization.stage3_param_persistence_threshold
        with ConstructionSharder(self._comm, threshold):
            yield

    # ---- running -----------------------------------------------------------------------------------------------

    def _scope(self) -> AbstractContextManager[None]:
        """Make parameters of the LightningModule itself readable inside its steps."""
        return self._engine.forward_scope() if self._engine is not None else nullcontext()

    def _begin_batch(self, trains: bool) -> None:
        if self._signals is not None:
            self._signals.begin_batch(trains, self.persistence.foreground)

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        self.persistence.tick()
        assert self.lightning_module is not None
        assert self._comm is not None
        self.config = self._reconciler.see(
            args[0] if args else None, self.lightning_module.trainer, self._comm, self.is_global_zero
        )
        with phase("forward"), self._scope():
            return super().training_step(*args, **kwargs)

    @override
    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        output = super().optimizer_step(*args, **kwargs)
        if self._signals is not None:
            self._signals.pass_point(True)
        return output

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        self._begin_batch(False)
        with self._scope():
            return super().validation_step(*args, **kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        self._begin_batch(False)
        with self._scope():
            return super().test_step(*args, **kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        self._begin_batch(False)
        with self._scope():
            return super().predict_step(*args, **kwargs)

    @contextmanager
    @override
    def block_backward_sync(self) -> Generator[None, None, None]:
        with self.engine.no_sync():
            yield

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        self._begin_batch(True)

    @override
    def on_validation_start(self) -> None:
        super().on_validation_start()
        self.progress.before_validation()
        sync_buffers(self.engine)

    @override
    def on_validation_end(self) -> None:
        super().on_validation_end()
        self.progress.after_validation()
        self.engine.gatherer.release_all()
        self.engine.offload_manager.check(self.engine.comm, "weights in files")

    @override
    def on_test_end(self) -> None:
        self.engine.gatherer.release_all()
        self.engine.offload_manager.check(self.engine.comm, "weights in files")

    @override
    def on_predict_end(self) -> None:
        self.engine.gatherer.release_all()
        self.engine.offload_manager.check(self.engine.comm, "weights in files")

    # ---- the end -----------------------------------------------------------------------------------------------

    @override
    def teardown(self) -> None:
        """Stop all threads; keep the shards. No collectives after an error: other ranks may be gone."""
        module = self.lightning_module
        trainer = module._trainer if module is not None else None
        clean = trainer is not None and trainer.state.status != TrainerStatus.INTERRUPTED
        self.stop_monitoring(clean)
        if self._engine is not None:
            uninstall(self._engine)
        self.persistence.close() if clean else self.persistence.abandon()
        if self._engine is not None and clean and self._start_method != "popen":
            restore_whole(self._engine)  # the launcher sends rank 0's state dict to the parent process
        fitted = trainer is not None and trainer.state.fn == TrainerFn.FITTING
        if self._engine is not None and module is not None and fitted and self._layer_sync:
            self._layer_sync.revert(module)
        if self.cluster_environment is not None:
            self.cluster_environment.teardown()
        self.restoring.forget()
        self._reconciler.take_back()
        self.progress.finish()
        self.precision_plugin.teardown()
        if self.accelerator is not None:
            self.accelerator.teardown()
        self.checkpoint_io.teardown()
        if self._signals is not None:
            self._signals.give_back()
            self._signals = None
        if self._engine is not None:
            self._engine.offload_manager.rest()
        if self._comm is not None:
            self._comm.rest()

    @override
    def on_exception(self, exception: BaseException) -> None:
        """Skip DDP's advice on unused parameters; explain errors caused by another rank."""
        if self._comm is not None:
            self._comm.tell(exception)

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: Any) -> None:
        starts = {"": "popen", "_spawn": "spawn", "_fork": "fork", "_notebook": "fork"}
        for stage in (1, 2, 3):
            for suffix, start_method in starts.items():
                strategy_registry.register(
                    f"zero_{stage}{suffix}",
                    cls,
                    description=f"ZeRO stage {stage}, processes started with {start_method}",
                    override=True,
                    stage=stage,
                    start_method=start_method,
                )
