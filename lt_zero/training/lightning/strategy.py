"""``ZeroStrategy``: the engine behind Lightning's Trainer. Each hook hands its work to the part that owns it."""

from __future__ import annotations

import os
import sys
from collections.abc import Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins import Precision, TorchSyncBatchNorm
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.optim import Optimizer
from torchmetrics import Metric
from typing_extensions import override

from lt_zero.common.compat import counts_batches, set_device_mesh
from lt_zero.common.descriptors import explain_full_table
from lt_zero.common.phases import phase
from lt_zero.config import ZeroConfig
from lt_zero.config.applicability import ignored_keys, tell_ignored
from lt_zero.config.blocks import ActivationCheckpointing
from lt_zero.core.comm.world import World
from lt_zero.core.engine.engine import Engine
from lt_zero.core.followers import end_fit
from lt_zero.training.lightning import setup as set_up
from lt_zero.training.lightning.arguments import explained
from lt_zero.training.lightning.metrics import count_all_ranks, count_data_ranks
from lt_zero.training.lightning.precision import ZeroPrecision
from lt_zero.training.lightning.reconcile import Reconciler
from lt_zero.training.lightning.run_queries import RunQueries
from lt_zero.training.lightning.setup import RunSnapshot, Signals
from lt_zero.training.session import move_buffers

if TYPE_CHECKING:
    from lt_zero.training.lightning.turns.trainer import TrainerTurns

DEFAULT_TIMEOUT = timedelta(minutes=30)
_MOVES = ("transfer_batch_to_device", "on_after_batch_transfer")  # hooks of the user's while a batch is moved


class ZeroStrategy(RunQueries):
    """Trains with optimizer states, gradients and parameters sharded over the ranks (ZeRO, arXiv:1910.02054).

    Args:
        stage: 0 shards nothing, 1 optimizer states, 2 also gradients, 3 also parameters (default: the config's, or 3).
        config: keys of a DeepSpeed configuration: the path of a JSON or YAML file, a mapping, or a ``ZeroConfig``.
        overrides: ``key=value`` and ``group=option`` in Hydra's grammar, applied to ``config``.
        accelerator, parallel_devices, cluster_environment, checkpoint_io, precision_plugin: as in every strategy.
        process_group_backend: torch's for the device by default: ``gloo`` on CPU, ``nccl`` on CUDA.
        timeout: of collectives.
        start_method: ``popen``, or ``spawn``, ``fork``, ``forkserver`` for multiprocessing and notebooks.
        activation_checkpointing: what backward recomputes: "full" or True for everything inside the model's repeated
            blocks, "selective", "none", or keys of that block of the configuration, which must not contradict it.
        broadcast_buffers: whether buffers that change are rank 0's in each training forward, as for ``DDPStrategy``
            (default: the config's, or True).
        tensor_parallel_size: ranks that share the tensors of each layer; ``tensor_parallel.autotp_size`` of the
            configuration. The module is parallelized in ``configure_model``, over
            ``self.device_mesh["tensor_parallel"]``.
        pipeline_parallel_size: ranks that have some of the layers each; ``pipeline.stages`` of the configuration. The
            module makes a ``lt_zero.parallel.Pipeline`` in ``configure_model``.
        sequence_parallel_size: ranks that have parts of the same sequences; the key of that name. Batches are cut for
            them, see ``lt_zero.parallel.cut_batch``.
        expert_parallel_size: data ranks that share the experts of each layer, which are ``lt_zero.parallel.Experts``;
            ``expert_parallel`` of the configuration.
        dp_replicate_size: groups of data ranks that shard, and hold a full copy each;
            ``zero_optimization.dp_replicate_size`` of the configuration.
        virtual_ranks: micro-batches of a round, which any number of ranks that divides it runs with the same results,
            to the bit; ``reproducible.virtual_ranks`` of the configuration.

    Raises:
        ConfigError: names every problem: unknown keys, wrong values, keys that contradict each other.
    """

    _OF_A_RUN = frozenset({"_engine", "_signals", "_epoch", "_turns", "session", "checkpoints", "monitor", "data"})
    _engine: Engine | None = None
    _turns: TrainerTurns | None = None  # None: there are no rounds
    _signals: Signals | None = None
    _epoch = 0  # of the last batch, on all ranks

    @explained
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
        broadcast_buffers: bool | None = None,
        tensor_parallel_size: int | None = None,
        pipeline_parallel_size: int | None = None,
        sequence_parallel_size: int | None = None,
        expert_parallel_size: int | None = None,
        dp_replicate_size: int | None = None,
        virtual_ranks: int | None = None,
    ) -> None:
        loaded = self._read_arguments(
            stage=stage,
            config=config,
            overrides=overrides,
            activation_checkpointing=activation_checkpointing,
            broadcast_buffers=broadcast_buffers,
            start_method=start_method,
            timeout=timeout,
            process_group_backend=process_group_backend,
            tensor_parallel_size=tensor_parallel_size,
            pipeline_parallel_size=pipeline_parallel_size,
            sequence_parallel_size=sequence_parallel_size,
            expert_parallel_size=expert_parallel_size,
            dp_replicate_size=dp_replicate_size,
            virtual_ranks=virtual_ranks,
        )
        self._reconciler = Reconciler(loaded.usable(), loaded.marks)
        loaded.announce()
        self._group_timeout = timeout
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

    @override
    def __getstate__(self) -> dict[str, Any]:
        """A copy (of a pickled or deep-copied Trainer) starts unused: without threads, files and process groups."""
        return {name: value for name, value in super().__getstate__().items() if name not in self._OF_A_RUN}

    @override
    def __repr__(self) -> str:
        # Lightning prints this in its error when a strategy is passed to the wrong class, so it names the right one.
        return (
            f"ZeroStrategy(stage={self.stage}), which is for the Trainer of the package lightning; Fabric takes "
            f"lt_zero.FabricZeroStrategy(stage={self.stage}), and the package pytorch_lightning takes this one after "
            "lt_zero.as_pytorch_lightning()"
        )

    @property
    def run(self) -> RunSnapshot:
        """A snapshot for the parts of the strategy, which do not see the strategy."""
        return RunSnapshot(
            config=self._reconciler.config,
            shown=self._reconciler.shown,
            checkpoint_io=self.checkpoint_io,
            session=self.session,
            loss_scale=self.precision_plugin.loss_scale_controller,
            optimizers=tuple(self.optimizers),
            built=self._engine,
            module=self.lightning_module,
            rank=self.global_rank,
            start_method=self._start_method,
        )

    @property
    def _module(self) -> pl.LightningModule:
        if self.lightning_module is None:
            raise RuntimeError("ZeroStrategy has no module yet: Trainer.fit, validate, test or predict brings it.")
        return self.lightning_module

    # ---- what the user can ask ---------------------------------------------------------------------------------

    @property
    def engine(self) -> Engine:
        """The engine of the current module. Raises RuntimeError before set-up."""
        return self._engine if self._engine is not None else self.run.engine

    @property
    def world(self) -> World | None:
        """All ranks; set in ``setup_environment``."""
        return self.session.known.world if self.session.known is not None else None

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
            self._precision_plugin = ZeroPrecision.configured(precision_plugin, self.config, self.accelerator)

    # ---- set-up ------------------------------------------------------------------------------------------------

    @override
    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        if not self._starts_ranks():
            return
        super()._configure_launcher()
        if self._start_method != "popen":
            from lt_zero.training.lightning.process_launchers import TrainerLauncher

            self._launcher = TrainerLauncher(self, self._start_method)

    @override
    def setup_distributed(self) -> None:
        with self._connecting(self.set_world_ranks):
            super().setup_distributed()

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        if self.lightning_module is not None:  # else the caller wants the process group before there is a run
            self.monitor.attach(self._module.trainer, self.global_rank, self.local_rank)
        self.session.loss_scale = self.precision_plugin.loss_scale_controller
        new_log = self.monitor.new_log
        first = partial(self.monitor.record, new=True)
        if not self.session.join(self.config, self.root_device, self._group_timeout, self._node_rank, new_log, first):
            self.monitor.record(self.session.world, new=False)
        self.data.follow(self.session.rounds)
        self.checkpoints.begin_run()
        if self.lightning_module is not None and self.device_mesh is not None:
            set_device_mesh(self.lightning_module, self.device_mesh)

    @override
    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any = "mean") -> Any:
        """Reduce over the ranks that see different tokens, unless ``group`` says over which.

        Raises:
            ValueError: sequences are cut over ranks, and it is no mean; see parallel/reductions.py.
        """
        if self._turns is not None:
            self._turns.refuse_inside("a reduction over ranks")
        if group is None:
            own = counts_batches(sys._getframe(1))
            division = self.session.division
            group = division.data_group if own else division.group_of_reduction(reduce_op)
        return super().reduce(tensor, group, reduce_op)

    @override
    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        """Gather from the ranks that see different tokens, unless ``group`` says from which."""
        if self._turns is not None:
            self._turns.refuse_inside("all_gather")
        return super().all_gather(tensor, group if group is not None else self.session.division.token_group, sync_grads)

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Decide over all ranks, also those that see the same data: all must go on in the same way."""
        return self._decide(decision, all, super().reduce)

    @property
    def _node_rank(self) -> int:
        assert self.cluster_environment is not None
        return self.cluster_environment.node_rank()

    @override
    def connect(self, model: pl.LightningModule) -> None:
        super().connect(model)
        self._reconciler.lend_optimizers(model)

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        assert self.accelerator is not None
        if self.session.known is None:
            raise RuntimeError("ZeroStrategy.setup needs the process group: call setup_environment() first.")
        world = self.session.world
        self.session.loss_scale = self.precision_plugin.loss_scale_controller
        self.checkpoints.open_none(self.run)
        self.accelerator.setup(trainer)
        set_up.check_callbacks(trainer, self.stage, self.device_mesh is not None)
        fitting = trainer.state.fn == TrainerFn.FITTING
        self.session.compare_model(self._module)  # "auto" depends on it, and whether an engine is used again
        if fitting:
            self._reconciler.agree(trainer, self._module, world, self.session.data_parts, self.is_global_zero)
        self.checkpoints.set_up(self.run)
        set_up.refuse_own_reads(self._module, self.session.division.batch_cut)
        if self.config.zero_optimization.sync_bn_in_backward and self._layer_sync is None:
            self._layer_sync = TorchSyncBatchNorm()
        if fitting and self._layer_sync:
            self.model = self._layer_sync.apply(self._module)
        plugin = self.precision_plugin
        module = self._module
        before = self._engine
        plugin.convert_module(module)
        self.model_to_device()
        known = set_up.find_engine(module, self.config, plugin.policy, before, fitting, world)
        if known is None:
            how = self.root_device, plugin.policy, fitting
            self.session.build(module, self.config, *how, load=self._load_into, weight=self._loss_weight)
        else:
            self.session.division.adopt(module)
            self._load_into(known)
        assert self._engine is not None
        if known is None:
            set_up.show_model(self._engine)
            tell_ignored([] if fitting else ignored_keys(self.config), self.global_rank)
        elif fitting:
            set_up.show_features(known, self.session.follow(known))
        set_up.skip_graphs(trainer, self._engine)
        plugin.engine = self._engine
        plugin.device_type = self.root_device.type
        # In manual optimization nothing tells which backward is the last one of a step.
        self._engine.leave_sums_to_steps(fitting and not module.automatic_optimization)
        self._begin_turns()
        if fitting:
            self.data.watch(trainer)
            self.setup_optimizers(trainer)
            self.monitor.start(self.run, new=self._engine is not before)
        self.setup_precision_plugin()
        self._signals = Signals(trainer, world.agreement)

    @property
    @override
    def _predicts(self) -> bool:
        return self.lightning_module is not None and bool(self._module.trainer.predicting)

    def _begin_turns(self) -> None:
        """Begin the rounds of a run, if it has some. Collective."""
        rounds = self.session.rounds
        if rounds.count is None:
            return
        from lt_zero.training.lightning.turns.trainer import TrainerTurns

        self._end_turns()
        rounds.begin(anew=True)
        self._turns = TrainerTurns(rounds, self._module, self.engine, self._transferred)
        self.precision_plugin.turns = self.data.turns = self._turns

    def _end_turns(self) -> None:
        if self._turns is not None:
            self._turns.leave()
            self._turns = self.precision_plugin.turns = self.data.turns = None

    def _transferred(self, batch: Any, dataloader_idx: int) -> Any:
        """A batch on the device, which Lightning has not fetched by itself."""
        batch = self.precision_plugin.convert_input(batch)
        batch = self._module._on_before_batch_transfer(batch, dataloader_idx=dataloader_idx)
        return self.batch_to_device(batch, dataloader_idx=dataloader_idx)

    def _loss_weight(self) -> float:
        """Factor by which Lightning multiplies losses."""
        module = self._module
        return 1.0 / module.trainer.accumulate_grad_batches if module.automatic_optimization else 1.0

    def _load_into(self, engine: Engine) -> None:
        self._engine = engine
        self.checkpoints.load_deferred(self.run)

    @override
    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        # Optimizers of an earlier run refer to fragments that were freed.
        self._reset_optimizers_and_schedulers()
        of_ranks = partial(self.session.division.peers.ask_all, name="parameters to train")
        self._reconciler.lend_optimizers(trainer.lightning_module, of_ranks)
        with set_up.naming_idle_stage(self._module, self.session.division.peers):
            super().setup_optimizers(trainer)
        # Copies of the module that are made during training must not contain the replaced method.
        self._reconciler.take_back()
        set_up.shard_optimizers(self.run, trainer, self.lr_scheduler_configs)

    @override
    def model_to_device(self) -> None:
        """Move buffers and metrics only; parameters move bucket by bucket when sharded."""
        for child in self._module.modules():
            if isinstance(child, Metric):
                child.to(self.root_device)
        if self.session.division.token_group is not None:
            count_data_ranks(self._module, self.session.division.token_group)  # until ``teardown``
        move_buffers(self._module, self.root_device)

    @override
    def configure_ddp(self) -> None:
        """Make no wrapper: the engine hooks the module itself."""

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
        division = self.session.division
        sharder = self._sharded_construction() if division.known is not None else nullcontext()
        compare = partial(self.session.compare_peers, self._module)
        with division.building(self._module, compare), sharder:
            yield

    # ---- running -----------------------------------------------------------------------------------------------

    @override
    def process_dataloader(self, dataloader: object) -> object:
        trainer = self._module.trainer
        loader = super().process_dataloader(dataloader)
        if self.session.known is None:
            return self.data.process(loader, trainer, self.world_size)
        if self.session.rounds.count is not None and not trainer.predicting:
            loader = self.session.rounds.loader(loader)
        return self.data.process(loader, trainer, self.session.data_parts)

    @override
    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        """Move a batch; of its sequences the part of this rank, if they are cut."""
        moved = self._moved_batch(batch, device, dataloader_idx)
        if self._turns is not None:
            self._turns.transferred()
        return moved

    def _moved_batch(self, batch: Any, device: torch.device | None, dataloader_idx: int) -> Any:
        move = partial(super().batch_to_device, device=device, dataloader_idx=dataloader_idx)
        division = self.session.division
        if division.batch_cut is None:
            return move(batch)
        cut = partial(division.cut_batch, module=self._module, kind=str(self._module.trainer.state.stage))
        # On the host, which need not wait for the device then to look at masks and positions.
        return cut(move(batch)) if self._sees_moved_batches(division.batch_cut.hook) else move(cut(batch))

    def _sees_moved_batches(self, cutting: str) -> bool:
        """True if code of the user gets whole batches on the device; ``cutting``: name of a hook that does."""
        module = self._module
        data: Any = module.trainer.datamodule  # type: ignore[attr-defined]
        owners = [module] if data is None else [module, data]
        return hasattr(module, cutting) or any(is_overridden(hook, owner) for hook in _MOVES for owner in owners)

    @override
    def on_train_start(self) -> None:
        self._epoch = self._module.current_epoch
        self.data.start()
        self.session.rounds.begin(anew=False)

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        if (epoch := self._module.current_epoch) != self._epoch:
            self._epoch = epoch
            self.engine.world.meet(f"the start of epoch {epoch}")
        self.data.begin_batch()
        self._pass_point(trains=True, begins=True)

    def _pass_point(self, trains: bool, begins: bool = False) -> None:
        """Count a point at which all ranks can act on signals, and do so if that was agreed on.

        ``begins``: it is the beginning of a batch. ``trains``: of training.
        """
        signals = self._signals
        if signals is not None and ((agreed := signals.step_boundary(trains)) or signals.agreed):
            signals.serve(agreed, self.checkpoints.foreground if begins else None)

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        if self._turns is None:
            return self._train(*args, **kwargs)
        return self._turns.training_step(self._train, *args, **kwargs)

    def _train(self, *args: Any, **kwargs: Any) -> Any:
        """The training step of one batch."""
        engine = self.engine
        session = self.session
        module = self._module
        batch = args[0] if args else None
        if session.saver.pending is not None:
            session.before_step()
        if not self._reconciler.seen:
            self._reconciler.see(batch, module.trainer, engine.world, session.data_parts, self.is_global_zero)
        session.division.compare_batch(batch)
        with phase("forward"), engine.forward_scope(), session.division.forward(module, module.training):
            if not self.monitor.watches:
                return super().training_step(*args, **kwargs)
            return self.monitor.training_step(module, batch, partial(super().training_step, *args, **kwargs))

    @override
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        if self._turns is None:
            return self._go_back(closure_loss, optimizer, *args, **kwargs)
        run = partial(self._go_back, optimizer=optimizer)
        return self._turns.backward(run, self._train, closure_loss)

    def _go_back(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """The backward of one loss."""
        if not self.monitor.watches:
            with phase("backward"):
                return super().backward(closure_loss, optimizer, *args, **kwargs)
        call = partial(super().backward, closure_loss, optimizer, *args, **kwargs)
        return self.monitor.backward(self._module, closure_loss, call)

    @override
    def optimizer_step(self, optimizer: Optimizer, closure: Any, model: Any = None, **kwargs: Any) -> Any:
        call = partial(super().optimizer_step, optimizer, closure, model, **kwargs)
        watches = self.monitor.watches
        output = self.monitor.optimizer_step(self._module, optimizer, call) if watches else call()
        self._pass_point(trains=True)
        return output

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._evaluating():
            if self._turns is None:
                return super().validation_step(*args, **kwargs)
            return self._turns.evaluate("validation", super().validation_step, *args, **kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._evaluating():
            if self._turns is None:
                return super().test_step(*args, **kwargs)
            return self._turns.evaluate("test", super().test_step, *args, **kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._evaluating():
            return super().predict_step(*args, **kwargs)

    def _evaluating(self) -> AbstractContextManager[None]:
        """Handle signals, and make parameters of the LightningModule itself readable inside a step."""
        self._pass_point(trains=False, begins=True)
        return self._engine.forward_scope(trains=False) if self._engine is not None else nullcontext()

    @contextmanager
    @override
    def block_backward_sync(self) -> Generator[None, None, None]:
        with self.engine.no_sync():
            yield

    @override
    def on_validation_start(self) -> None:
        if self._module.trainer.state.fn == TrainerFn.FITTING:
            self.engine.world.meet("the start of validation")
        self.monitor.before_validation()
        self.data.before_validation()
        # All ranks must validate the same weights, with all steps in them.
        self.engine.prepare_reading()
        self.engine.reducer.free_buffers()
        if self.config.broadcast_buffers and self.engine.buffers.due:  # not inside of an accumulation window
            self.engine.buffers.sync()

    @override
    def on_validation_end(self) -> None:
        self.monitor.after_validation()
        self.data.after_validation()
        self._release_weights()

    @override
    def on_test_end(self) -> None:
        self._release_weights()

    @override
    def on_predict_end(self) -> None:
        self._release_weights()

    def _release_weights(self) -> None:
        self.engine.gatherer.release_all()
        self.engine.same_on_ranks.check_now()
        self.engine.offload_manager.check(self.engine.world, "weights in files")

    @override
    def barrier(self, *args: Any, **kwargs: Any) -> None:
        # Saves outside of a run are synchronous.
        world = self.world
        with world.explaining() if world is not None else nullcontext():
            super().barrier(*args, **kwargs)

    # ---- checkpoints -------------------------------------------------------------------------------------------

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Fragments on all ranks, or (full checkpoints) the full state dict; only rank 0 has values. Collective."""
        if self._engine is None or not self._engine.attached or self._engine.root is not self.lightning_module:
            return super().lightning_module_state_dict()
        self._engine.world.roll_call("Trainer.save_checkpoint")  # Lightning calls this first
        return self.checkpoints.model_state(self.run)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Fragments on all ranks, or (full checkpoints) the full state on rank 0 and {} elsewhere. Collective."""
        state = self.checkpoints.optimizer_state(self.run, optimizer)
        return super().optimizer_state(optimizer) if state is None else state

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        if "optimizer_states" in checkpoint:
            self.run.refuse_parent("the optimizer states")
        if self.world is not None:
            self.world.roll_call("Strategy.save_checkpoint")
        # Ranks may have computed different paths, for example with a time in the name; rank 0's is used.
        path = str(self.broadcast(filepath))
        self.checkpoints.save(self.run, checkpoint, path, storage_options)

    @override
    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        plugin = partial(super().load_checkpoint, checkpoint_path, weights_only)
        loads = self.checkpoints.loads()
        return loads.select(self.run, loads.open(self.run, checkpoint_path, weights_only, plugin))

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        self.checkpoints.loads().load_model(self.run, checkpoint, strict)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        self.checkpoints.loads().load_optimizers(self.run, cast("dict[str, Any]", checkpoint))

    @override
    def remove_checkpoint(self, filepath: str | Path) -> None:
        self.checkpoints.remove(self.run, str(filepath))

    # ---- the end -----------------------------------------------------------------------------------------------

    @override
    def on_train_end(self) -> None:
        self.engine.world.meet("the end of training")
        self.checkpoints.wait(self.run)
        if self._engine is not None:
            # The process groups may be destroyed after fit, so collectives that are still to come run now.
            self._engine.prepare_reading()

    @override
    def teardown(self) -> None:
        """Stop all threads; keep the shards. No collectives after an error: other ranks may be gone."""
        module = self.lightning_module
        trainer = self.run.trainer
        engine = self._engine
        clean = trainer is not None and trainer.state.status != TrainerStatus.INTERRUPTED
        self.monitor.stop(clean)
        if engine is not None:
            end_fit(engine)
        self.checkpoints.close(self.run, clean)
        if engine is not None and clean and self._start_method != "popen":
            from lt_zero.core.engine.full_params import restore_whole

            # The launcher sends rank 0's state dict to the parent process, so it must be whole.
            restore_whole(engine, join=True)
        fitted = trainer is not None and trainer.state.fn == TrainerFn.FITTING
        if engine is not None and module is not None and fitted and self._layer_sync:
            self._layer_sync.revert(module)
        if self.cluster_environment is not None:
            self.cluster_environment.teardown()
        self._reconciler.take_back()
        self._end_turns()
        self.data.finish()
        self.precision_plugin.teardown()
        if self.accelerator is not None:
            self.accelerator.teardown()
        self.checkpoint_io.teardown()
        if self._signals is not None:
            self._signals.give_back()
            self._signals = None
        if engine is not None:
            engine.grad_views.abort()
            engine.offload_manager.rest()
            engine.rest(clean)
        if module is not None:
            count_all_ranks(module)
        self.session.end(clean, leaves=self._start_method != "popen")

    @override
    def on_exception(self, exception: BaseException) -> None:
        """Skip DDP's advice on unused parameters; explain errors of another rank, and of a full table of files."""
        explain_full_table(exception)
        if self.world is not None:
            self.world.give_up(exception)
