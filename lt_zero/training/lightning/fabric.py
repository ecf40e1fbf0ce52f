"""``FabricZeroStrategy``: the engine behind Lightning Fabric, for one or several modules and optimizers."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from typing import Any, Literal

import torch
from lightning.fabric.accelerators.accelerator import Accelerator
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment, Precision
from lightning.fabric.strategies.ddp import DDPStrategy
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from typing_extensions import override

from lt_zero.checkpoint.native.directory import plain_path
from lt_zero.checkpoint.native.load import engine_of
from lt_zero.checkpoint.native.save import FABRIC
from lt_zero.checkpoint.same import load_same
from lt_zero.common.errors import ConfigError
from lt_zero.common.garbage import without_gc
from lt_zero.config import ZeroConfig
from lt_zero.config.applicability import Face, check_face
from lt_zero.config.blocks import ActivationCheckpointing
from lt_zero.config.load import shown
from lt_zero.core.comm.process_groups import is_chosen
from lt_zero.core.comm.shard_group import ShardGroup
from lt_zero.core.comm.world import World, together
from lt_zero.core.engine.engine import Engine
from lt_zero.core.engine.guard import owner_of
from lt_zero.core.step.sharded_optimizer import ShardedOptimizer
from lt_zero.training.checkpoints import Saving, export_weights, whole_weights
from lt_zero.training.lightning.arguments import explained
from lt_zero.training.lightning.checkpoint_plugin import writes_directories
from lt_zero.training.lightning.data_position.loop import LoopLoader
from lt_zero.training.lightning.data_position.position import is_stateful, tracked
from lt_zero.training.lightning.fabric_items import FabricItems, ShardedModule, optimizer_state
from lt_zero.training.lightning.precision import ZeroPrecision
from lt_zero.training.lightning.process_launchers import FabricLauncher
from lt_zero.training.lightning.sharded_strategy import ShardedStrategy
from lt_zero.training.restore import load_weights
from lt_zero.training.session import move_buffers
from lt_zero.training.turns import InTurns, StepTurns

log = logging.getLogger("lt_zero")


class FabricZeroStrategy(ShardedStrategy, DDPStrategy):
    """Fabric with optimizer states, gradients and parameters sharded over the ranks (ZeRO, arXiv:1910.02054).

    Args:
        stage, config, overrides, activation_checkpointing, broadcast_buffers: as for ``ZeroStrategy``. Optimizers and
            schedules are made by the script.
        tensor_parallel_size, pipeline_parallel_size, sequence_parallel_size, expert_parallel_size, dp_replicate_size:
            as for ``ZeroStrategy``. The script parallelizes the module, over
            ``fabric.strategy.device_mesh["tensor_parallel"]``; loaders that are set up return the rank's part of
            sequences.
        virtual_ranks: as for ``ZeroStrategy``.
        accelerator, parallel_devices, cluster_environment, checkpoint_io, precision: as in every strategy.
        process_group_backend: torch's for the device by default: ``gloo`` on CPU, ``nccl`` on CUDA.
        timeout: of collectives.
        start_method: ``popen``, or ``spawn``, ``fork``, ``forkserver`` for multiprocessing and notebooks.

    Raises:
        ConfigError: names every problem, also keys that Fabric's script decides.
    """

    face = Face.FABRIC
    _turns: StepTurns | None = None  # of the module that is trained in rounds

    @explained
    def __init__(
        self,
        stage: int | None = None,
        config: Mapping[str, Any] | ZeroConfig | str | os.PathLike[str] | None = None,
        overrides: Sequence[str] = (),
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision: Precision | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = timedelta(minutes=30),
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
        activation_checkpointing: Mapping[str, Any] | ActivationCheckpointing | str | bool | None = None,
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
        self.config: ZeroConfig = loaded.usable()
        self._shown = shown(self.config)  # in checkpoints
        loaded.announce()
        check_face(self.config, self.face)
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision=precision,
            process_group_backend=process_group_backend,
            timeout=timeout,
            start_method=start_method,
        )
        self._backward_sync_control = _NoSync()  # type: ignore[assignment]

    @override
    def __repr__(self) -> str:
        # Lightning prints this in its error when a strategy is passed to the wrong class, so it names the right one.
        return (
            f"FabricZeroStrategy(stage={self.stage}), which is for the Fabric of the package lightning; a Trainer "
            f"takes lt_zero.ZeroStrategy(stage={self.stage}), and the package lightning_fabric takes this one after "
            "lt_zero.as_pytorch_lightning()"
        )

    # ---- precision ---------------------------------------------------------------------------------------------

    @property
    @override
    def precision(self) -> ZeroPrecision:
        if self._precision is None:
            self.precision = ZeroPrecision()
        assert isinstance(self._precision, ZeroPrecision)
        return self._precision

    @precision.setter
    @override
    def precision(self, precision: Precision | None) -> None:
        self._precision = None
        if precision is not None:
            self._precision = ZeroPrecision.configured(precision, self.config, self.accelerator)

    # ---- set-up ------------------------------------------------------------------------------------------------

    @property
    def group(self) -> ShardGroup:
        """All ranks, over which modules are sharded. Raises RuntimeError before ``fabric.launch()``."""
        known = self.session.known
        if known is None and self._start_method != "popen":
            raise RuntimeError(
                f"This process is no rank: with start_method={self._start_method!r} the ranks are processes that run "
                "the function of fabric.launch(function), and end with it. Set up, train, save and load inside of it."
            )
        if known is None:
            raise RuntimeError("FabricZeroStrategy is not launched yet: call fabric.launch() before this.")
        return known

    @property
    def world(self) -> World:
        """All ranks. Raises RuntimeError before ``fabric.launch()``."""
        return self.group.world

    @property
    def _reading(self) -> World:
        """``world`` for loading: before ``fabric.launch()`` each process reads for itself, as with DDP."""
        return self.session.world if self.session.known is not None else World(None, self.root_device)

    @override
    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        if not self._starts_ranks():
            return
        super()._configure_launcher()
        if self._start_method != "popen":
            self._launcher = FabricLauncher(self, self._start_method)

    @override
    def _setup_distributed(self) -> None:
        with self._connecting(self._set_world_ranks):
            super()._setup_distributed()

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        if self.session.known is None:
            assert self.cluster_environment is not None
            self.session.loss_scale = self.precision.loss_scale_controller
            self.precision.device_type = self.root_device.type
            self.session.join(self.config, self.root_device, self._timeout, self.cluster_environment.node_rank())

    @override
    def all_reduce(self, tensor: Tensor, group: Any | None = None, reduce_op: Any = "mean") -> Tensor:
        """Reduce over the ranks that see different tokens, unless ``group`` says over which.

        Raises:
            ValueError: sequences are cut over ranks, and it is no mean; see parallel/reductions.py.
        """
        group = group if is_chosen(group) else self.session.division.group_of_reduction(reduce_op)
        return super().all_reduce(tensor, group, reduce_op)

    @override
    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        """Gather from the ranks that see different tokens, unless ``group`` says from which."""
        group = group if is_chosen(group) else self.session.division.token_group
        return super().all_gather(tensor, group, sync_grads)

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Decide over all ranks, also those that see the same data: all must go on in the same way."""
        return self._decide(decision, all, super().all_reduce)

    @override
    def process_dataloader(self, dataloader: Any) -> Any:
        """A loader; of the sequences of its batches the part of this rank, if they are cut.

        One that resumes by itself also saves what its order follows from; see data_position/loop.py.
        """
        loader = super().process_dataloader(dataloader)
        session = self.session
        if session.rounds.count is not None:
            return InTurns(session.rounds.loader(loader), session.rounds)
        name = type(loader).__name__

        def through(make: Callable[[], Any]) -> Any:
            cut = session.division.batch_cut
            if cut is None:
                return make()
            module = next((engine.root for engine in session.engines if hasattr(engine.root, cut.hook)), None)
            return (session.division.cut_batch(batch, module) for batch in make())

        if is_stateful(loader):
            ranks = int(self.distributed_sampler_kwargs["num_replicas"])
            made = LoopLoader(loader, ranks, self.world.rank == 0, through).loader
        elif session.division.batch_cut is None:
            return loader
        else:
            made = tracked(loader, through)
        if made is None:
            if session.division.batch_cut is None:
                log.warning(
                    f"The loader {name} cannot be tracked: a resumed loop may see samples in another order. Use a "
                    "loader whose class allows subclasses."
                )
                return loader
            raise TypeError(f"Batches of {name} cannot be cut. Pass a DataLoader, or call lt_zero.parallel.cut_batch.")
        return made

    @override
    def setup_module(self, module: nn.Module) -> ShardedModule:  # type: ignore[override]
        """Shard a module in place. One in evaluation mode gets no master weights, until it gets an optimizer."""
        return self._set_up(module, module.training)

    def _set_up(self, module: nn.Module, training: bool) -> ShardedModule:
        device, policy = self.world.device, self.precision.policy  # raises before fabric.launch()
        engine = self.session.build(module, self.config, device, policy, training)
        self.precision.engine = engine
        rounds = self.session.rounds
        if rounds.count is None or not training:
            return ShardedModule(module, engine, self.session.division.forward)
        if self._turns is not None:
            raise ConfigError.about(
                "reproducible.virtual_ranks",
                f"reproducible.virtual_ranks={rounds.count}: a backward is one micro-batch of a round, and this is the "
                "second module that is trained. Set up one module.",
            )
        if self.config.sequence_parallel_size > 1:
            raise ConfigError.about(
                "reproducible.virtual_ranks",
                f"reproducible.virtual_ranks={rounds.count}: with Fabric the batches of a round are not cut into parts "
                f"of sequences, and sequence_parallel_size={self.config.sequence_parallel_size}. Train in a Trainer or "
                "by lt_zero.initialize, or remove one of the keys.",
            )
        turns = self._turns = StepTurns(rounds, engine, self.config.pipeline.ranks)

        @contextmanager
        def forward(module: nn.Module, trains: bool) -> Iterator[None]:
            with turns.forward(trains), self.session.division.forward(module, trains):
                yield

        return ShardedModule(module, engine, forward)

    @override
    def setup_module_and_optimizers(
        self, module: nn.Module, optimizers: list[Optimizer], scheduler: LRScheduler | None = None
    ) -> tuple[nn.Module, list[Optimizer], Any]:
        sharded = self._set_up(module, training=True)
        for optimizer in optimizers if self.world.alone else ():  # several ranks compare all of it
            self._stepped_by(optimizer, sharded.engine)
        self._add(sharded.engine, optimizers)
        if scheduler is not None:
            number = self.session.number(self._sharded(scheduler.optimizer))
            self.session.hold(scheduler, number, self.config)
        return sharded, optimizers, scheduler

    @override
    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Shard an optimizer of one module that is set up.

        Raises:
            ValueError: it has parameters of no such module, or of several.
            NotEnoughMemory: the host has no memory for its states.
        """
        with self.world.agree("looking for the module of an optimizer", ValueError):
            engine = self._stepped_by(optimizer)
        self._add(engine, [optimizer])
        return optimizer

    def _add(self, engine: Engine, optimizers: Sequence[Optimizer]) -> None:
        self.session.add_optimizers(engine, optimizers)
        self.session.start_trial(engine, self.config, accumulation=1)

    def _stepped_by(self, optimizer: Optimizer, wanted: Engine | None = None) -> Engine:
        """The engine of an optimizer's parameters. Raises ValueError if there is not exactly one, or another one."""
        owners = {id(owner_of(p)) for group in optimizer.param_groups for p in group["params"]}
        engines = [engine for engine in self.engines if id(engine) in owners]
        if len(engines) == len(owners) == 1 and engines[0] is (wanted or engines[0]):
            return engines[0]
        name = type(optimizer).__name__
        if not engines:
            raise ValueError(
                f"{name} has no parameters of a module that is set up. Call fabric.setup(module, optimizer), or "
                "fabric.setup_module(module) first."
            )
        raise ValueError(f"{name} steps parameters of several modules, or others, too. Make one for each module.")

    @property
    def engines(self) -> list[Engine]:
        """Engines, one for each module, in the order in which they were set up."""
        return self.session.engines

    def _sharded(self, optimizer: Optimizer) -> ShardedOptimizer:
        sharded = ShardedOptimizer.of(optimizer)
        if sharded is None:
            raise ValueError(
                f"{type(optimizer).__name__} is not set up. Call fabric.setup(module, optimizer), or "
                "fabric.setup_optimizers(optimizer)."
            )
        return sharded

    @override
    def module_to_device(self, module: nn.Module) -> None:
        """Move buffers only; parameters move bucket by bucket when sharded."""
        move_buffers(module, self.root_device)

    @contextmanager
    @override
    def module_init_context(self, empty_init: bool | None = None) -> Generator[None, None, None]:
        """Parameters are sharded while they are constructed (stage 3), or made on the meta device if ``empty_init``."""
        placed = torch.device("meta") if empty_init else self._sharded_construction()
        with placed, self.precision.module_init_context():
            yield

    # ---- a step ------------------------------------------------------------------------------------------------

    @override
    def backward(self, tensor: Tensor, module: nn.Module | None, *args: Any, **kwargs: Any) -> None:
        engines = self.engines
        chosen = module.engine if isinstance(module, ShardedModule) else engines[0] if len(engines) == 1 else None
        tensor = self.session.begin_backward(chosen, tensor)
        # Without one, engines find out by themselves where their backward ends.
        with chosen.backward_pass() if chosen is not None else nullcontext():
            tensor.backward(*args, **kwargs)

    @override
    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        """Step, unless the gradients overflowed; clipped to ``gradient_clipping``. Returns the closure's result."""
        output = None
        closure = kwargs.pop("closure", None)
        if closure is None and self._turns is not None:
            self._turns.check_step("optimizer.step()")
        self.session.before_step()
        # The closure computes gradients of whole parameters, so it runs before the step, which works on shards.
        if closure is not None:
            with torch.enable_grad():
                output = closure()
            if self._turns is not None:
                self._turns.check_step("optimizer.step()")
        sharded = self._sharded(optimizer)
        limit = float(self.config.gradient_clipping or 0.0)
        self.session.step(sharded, limit, partial(optimizer.step, **kwargs))
        self.session.end_step(sharded)
        return output

    @override
    def clip_gradients_norm(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        max_norm: float | int,
        norm_type: float | int = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Tensor:
        """Clip, and return the norm (0D) from before. A step that is skipped for overflow is no error. Collective.

        Raises:
            RuntimeError: the norm is not finite, and ``error_if_nonfinite``.
        """
        controller = self.precision.loss_scale_controller
        sharded = self._sharded(optimizer)
        found = controller.clip_norm(sharded, float(max_norm), float(norm_type))
        if controller.skip:
            return torch.tensor(float("inf")) if controller.norm is None else controller.norm
        assert found is not None
        if error_if_nonfinite and sharded.found_inf is None and not bool(torch.isfinite(found)):
            raise RuntimeError(
                f"The total norm of order {norm_type} of the gradients is {float(found)}. Pass "
                "error_if_nonfinite=False to clip by it anyway."
            )
        return found

    @override
    def clip_gradients_value(self, module: nn.Module, optimizer: Optimizer, clip_val: float | int) -> None:
        self.precision.loss_scale_controller.clip_value(self._sharded(optimizer), float(clip_val))

    # Errors of Lightning's collectives tell which rank has ended.

    @override
    def barrier(self, *args: Any, **kwargs: Any) -> None:
        with self.session.explaining():
            super().barrier(*args, **kwargs)

    @override
    def broadcast(self, obj: Any, src: int = 0) -> Any:
        with self.session.explaining():
            return super().broadcast(obj, src)

    # ---- checkpoints -------------------------------------------------------------------------------------------

    @property
    def _items(self) -> FabricItems:
        """Saves and restores the items of a checkpoint."""
        controller = self.precision.loss_scale_controller
        return FabricItems(self.config, self._reading, self.session, controller, self.checkpoint_io)

    @override
    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        """Full tensors on rank 0, {} elsewhere. Collective."""
        if not isinstance(module, ShardedModule):
            return dict(module.state_dict())
        return whole_weights(module.engine, "Fabric.save")

    @override
    def get_optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Full tensors on rank 0, {} elsewhere. Collective."""
        return optimizer_state(optimizer)

    @override
    def load_module_state_dict(self, module: nn.Module, state_dict: Mapping[str, Any], strict: bool = True) -> None:
        load_weights(self._items.part(module, state_dict, strict))

    def full_state_dict(self, module: nn.Module) -> dict[str, Any]:
        """The state dict of a module that is set up, with full tensors on rank 0, {} on the others. Collective."""
        return whole_weights(self._engine_of(module), "full_state_dict")

    def export(self, module: nn.Module, path: str | os.PathLike[str], **options: Any) -> None:
        """Write all weights of a module to files that are readable without lt_zero, by default in fp16. Collective.

        ``options`` and errors are those of ``lt_zero.export``.
        """
        engine = self._engine_of(module)
        engine.world.roll_call("export")  # before the first of Fabric's collectives
        export_weights(engine, self.broadcast(path), **options)
        self.barrier("export")

    def _engine_of(self, module: nn.Module) -> Engine:
        if (engine := engine_of(module)) is None:
            raise ValueError(f"{type(module).__name__} is not set up. Call fabric.setup(module) first.")
        return engine

    @override
    @together
    @without_gc
    def save_checkpoint(
        self,
        path: str | os.PathLike[str],
        state: dict[str, Any],
        storage_options: Any | None = None,
        filter: dict[str, Callable[[str, Any], bool]] | None = None,
    ) -> None:
        """Write a directory that loads at any number of ranks and stage, or (``checkpoint.format: full``) one file.

        Collective. With ``checkpoint.async`` a thread writes the directory while training goes on, and the next step,
        save or load after it raises its errors.

        Raises:
            CheckpointError: on all ranks; an earlier checkpoint at ``path`` is kept.
        """
        world = self.world
        world.roll_call("Fabric.save")  # before the first of Fabric's collectives
        self.precision.loss_scale_controller.read_skip_flag()
        path = plain_path(self.broadcast(path))
        self.session.saver.wait(world)
        if not writes_directories(self.config, self.checkpoint_io):
            self._items.write(path, state, storage_options, filter or {})
            return
        if storage_options is not None:
            raise TypeError("Sharded checkpoints do not support storage_options: set checkpoint.format='full'.")
        items = self._items
        content, names = items.collect(state, filter or {})
        prefixes = content[FABRIC]["modules"]
        frozen = [prefixes[key] + name for key in prefixes for name in sorted(items.frozen(state[key]))]
        about = self.config, self._shown, self.precision.precision, frozen
        self.session.save(Saving(content, names, *about, peers=self.session.division.peers.ranks), path)

    @override
    def load_checkpoint(
        self,
        path: str | os.PathLike[str],
        state: nn.Module | Optimizer | dict[str, Any] | None = None,
        strict: bool = True,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Restore ``state`` in place from a directory, or from a file as Fabric writes it with other strategies.

        Returns what was not restored; without ``state`` everything, in full tensors. Collective; before
        ``fabric.launch()`` each process reads for itself.

        Raises:
            KeyError: ``strict``, and a key of ``state`` is not in the checkpoint.
            CheckpointError: on all ranks.
        """
        with self._reading.together("FabricZeroStrategy.load_checkpoint"):
            self._reading.roll_call("Fabric.load")
            return self._load(plain_path(self.broadcast(path)), state, strict, weights_only)

    def _load(
        self, path: str, state: nn.Module | Optimizer | dict[str, Any] | None, strict: bool, weights_only: bool | None
    ) -> dict[str, Any]:
        world = self._reading
        # The checkpoint may be the one that is being written in the background.
        self.session.saver.wait(world)
        opened, of_items = load_same(world, path, partial(self._items.opened, path, weights_only))
        saved = opened.saved
        if not state:
            return saved
        self.precision.loss_scale_controller.read_skip_flag()  # of a step before
        if not isinstance(state, dict):
            key = opened.only(state, path) if of_items else None
            self._items.restore(opened, {key: state}, {key: saved if key is None else saved[key]}, strict)
            return {}
        if strict and (missing := [key for key in state if key not in saved]):
            raise KeyError(f"{path} has no {missing[0]!r}; it has {', '.join(saved)}. Pass strict=False to go on.")
        objects = {key: value for key, value in state.items() if key in saved and hasattr(value, "load_state_dict")}
        self._items.restore(opened, objects, {key: saved.pop(key) for key in objects}, strict)
        for key in state.keys() & saved.keys():
            state[key] = saved.pop(key)
        return saved

    @override
    def teardown(self) -> None:
        super().teardown()
        self.session.end()


class _NoSync:
    """Fabric's ``no_backward_sync``."""

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        if not isinstance(module, ShardedModule):
            raise TypeError(f"{type(module).__name__} is not set up. Pass what fabric.setup(module) returned.")
        return module.engine.no_sync() if enabled else nullcontext()
