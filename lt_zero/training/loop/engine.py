"""``TrainingEngine``: a sharded model, its optimizer and schedule behind the interface of DeepSpeed's engine (0.19).

Note [Accumulation in a loop]
    Micro-batches are averaged: each backward adds the gradients of its loss as it is, and they carry the number of
    micro-batches as a part of their scale (loss_scale.py). So ``engine.backward(loss)`` and a plain ``loss.backward()``
    are the same. After the backward of the last micro-batch they are divided by that scale. So the step takes the
    gradients as user code reads and changes them before ``engine.step()``. That call also counts micro-batches.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, cast
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from typing_extensions import override

from lt_zero.checkpoint.native.directory import inside, is_url, plain_path
from lt_zero.checkpoint.native.load import as_lightning, entries_of, loss_scale, trained_weights
from lt_zero.checkpoint.native.pieces import optimizer_fragments, parameter_names
from lt_zero.checkpoint.native.save import LOOP
from lt_zero.checkpoint.native.values_of_ranks import OF_RANKS, own_values, values_of_ranks
from lt_zero.checkpoint.open import LATEST, latest_of, name_latest, opened_source
from lt_zero.checkpoint.same import load_same
from lt_zero.common import accelerator, plain_names
from lt_zero.common.arguments import expect, expect_path, wrong
from lt_zero.common.compat import never_a_graph, without_torch_function
from lt_zero.common.compat.of_compile import is_compiled
from lt_zero.common.errors import CheckpointError, ConfigError
from lt_zero.common.garbage import without_gc
from lt_zero.common.tensor_tree import map_tensors
from lt_zero.common.users_code import warn
from lt_zero.config import ZeroConfig
from lt_zero.config.applicability import Face, check_face
from lt_zero.config.load import shown
from lt_zero.config.options import with_sizes
from lt_zero.config.precision import dtype_policy, resolve_mode
from lt_zero.core.comm.process_groups import own_gpu
from lt_zero.core.comm.world import World, together
from lt_zero.core.engine.engine import Engine
from lt_zero.core.engine.outside_steps import within_step
from lt_zero.core.health.launchers import local_rank
from lt_zero.core.step.sharded_optimizer import ShardedOptimizer
from lt_zero.optim.from_config import configured_optimizer, configured_scheduler
from lt_zero.training.checkpoints import (
    Saving,
    beside,
    export_weights,
    frozen_names,
    weights_to_save,
    whole_weights,
)
from lt_zero.training.loop.monitoring import monitor_of
from lt_zero.training.loop.queries import EngineQueries
from lt_zero.training.loss_scale import loss_scale_controller
from lt_zero.training.restore import Contents, ModuleContents, restore
from lt_zero.training.session import Session
from lt_zero.training.turns import InTurns, StepTurns

ended: WeakSet[Engine] = WeakSet()  # whose ``TrainingEngine`` was destroyed
_BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


class TrainingEngine(EngineQueries):
    """A sharded model, stepped by its owner's loop. Made by ``initialize``.

    Attributes:
        module: the model.
        optimizer: of torch; its groups hold the module's parameters, its state this rank's part.
        engine: runs the model.
        monitor: writes ``Train/Samples/train_loss`` and others where ``csv_monitor`` and its like say.
        data_ranks: how many ranks, or sets of tensor-parallel ranks, see different data; or the virtual ranks.
        micro_steps, global_steps, global_samples: micro-batches (or rounds of them), steps and samples so far.
        tracks_norm: whether steps compute the norm of gradients for ``get_global_grad_norm`` although nothing else
            needs it; the same on all ranks.
    """

    def __init__(self, model: nn.Module, config: ZeroConfig, args: Any = None) -> None:
        super().__init__()
        local = local_rank(int(getattr(args, "local_rank", None) or 0))
        placed = next((p.device for p in model.parameters() if p.device.type != "meta"), torch.device("cpu"))
        wanted = accelerator.default_device(own_gpu(local)) if accelerator.is_available() else placed
        accelerator.make_current(wanted)
        self.device = wanted
        self.local_rank = local
        check_face(config, Face.LOOP)
        policy = dtype_policy(config, resolve_mode(config, "32-true"))
        self.loss_scale_controller = loss_scale_controller(config, policy)
        self.session = Session(Face.LOOP)
        self.session.loss_scale = self.loss_scale_controller
        self.session.join(config, wanted)
        self.world = self.session.world
        self.session.compare_model(model)  # "auto" depends on it
        config = with_sizes(config, model, (), partial(self.session.division.peers.ask_all, name="sizes of the model"))
        self.global_rank = self.world.rank
        self.world_size = self.world.size
        self.data_ranks = self.session.data_parts
        self._micro, self._gas = _batch_sizes(config, self.data_ranks)
        if config.pipeline.ranks > 1:  # may follow from two batch sizes
            config = config.model_copy(update={"gradient_accumulation_steps": self._gas})
        self.monitor = monitor_of(config, self.world, policy.mode)
        self._added = self._gas  # micro-batches whose losses are added as they are
        self.engine: Engine = self.session.build(model, config, wanted, policy, training=True)
        rounds = self.session.rounds
        stages = config.pipeline.ranks
        self._turns = StepTurns(rounds, self.engine, stages) if rounds.count is not None else None
        self._losses: list[Tensor] = []  # of the micro-batches of a round that this rank has run
        self.module = model
        self._config = config
        self._shown = shown(config)
        self.optimizer: Optimizer | None = None
        self.lr_scheduler: LRScheduler | None = None
        self.training_dataloader: DataLoader[Any] | None = None
        self.micro_steps = self.global_steps = self.global_samples = 0
        self._sharded: ShardedOptimizer | None = None
        self._pending = 0  # micro-batches since the last step
        self._boundary: bool | None = None  # set_gradient_accumulation_boundary
        self._quiet = False  # inside no_sync
        self._scaled = False  # a loss of this micro-batch was scaled
        self._applied = False
        self._skipped_before = 0
        self._norm: Tensor | None = None
        self.tracks_norm = False

    @together
    def set_up(self, optimizer: Any, parameters: Iterable[Any] | None, schedule: Any) -> None:
        """Shard the optimizer that was given or is configured, and make the schedule. Collective."""
        if parameters is not None and (isinstance(parameters, str) or not isinstance(parameters, Iterable)):
            remedy = "pass parameters or parameter groups, such as model.parameters()"
            raise wrong("lt_zero.initialize(model_parameters=...)", parameters, remedy)
        block = self._config.optimizer
        wanted = list(parameters) if parameters is not None else None
        expects = "pass a torch.optim.Optimizer, or a function that makes one of the parameters"
        if optimizer is not None and not callable(optimizer):
            expect(optimizer, Optimizer, "lt_zero.initialize(optimizer=...)", expects)
        if schedule is not None and not hasattr(schedule, "step") and not callable(schedule):
            remedy = "pass a schedule, or a function that makes one"
            raise wrong("lt_zero.initialize(lr_scheduler=...)", schedule, remedy)
        given_one = optimizer is not None
        if callable(optimizer) and not isinstance(optimizer, Optimizer):
            # Guards would intercept each access.
            with without_torch_function():
                trained = wanted or [p for p in self.module.parameters() if p.requires_grad]
            optimizer = optimizer(trained or [{"params": []}])  # a stage of a pipeline may have none
        elif optimizer is None and block is not None:
            of_ranks = partial(self.session.division.peers.ask_all, name="parameters to train")
            optimizer = configured_optimizer(block, self.module, wanted, of_ranks)
        given = [optimizer] if optimizer is not None else []
        copies = self._config.checkpoint.async_save
        self.session.add_optimizers(self.engine, given, accumulates=self._gas > 1, saves=copies)
        if optimizer is None:
            return
        self.optimizer = optimizer
        self._sharded = ShardedOptimizer.of(optimizer)
        self._tell_of_two("optimizer", block is not None and given_one, "the argument is used")
        self.monitor.measure(self.engine, self._gas, self._micro or 1, lambda: self.session.loss_scale.scale)
        self.engine.before_backward.append(self._begin_backward)
        self.engine.after_backward.append(self._end_backward)
        if self._config.scheduler is not None:
            self._tell_of_two("scheduler", schedule is not None, "the configured one is used")
            schedule = configured_scheduler(self._config.scheduler, optimizer)
        elif schedule is not None and not isinstance(schedule, LRScheduler) and not hasattr(schedule, "step"):
            schedule = schedule(optimizer)
        self.lr_scheduler = schedule
        if schedule is not None:
            self.session.hold(schedule, 0, self._config)
        self.session.start_trial(self.engine, self._config, accumulation=self._gas, micro=self._micro, loop=True)

    def _tell_of_two(self, key: str, both: bool, choice: str) -> None:
        """Say which of an argument and a block of the configuration is used, as DeepSpeed chooses."""
        if both and self.global_rank == 0:
            warn(f"{key}.type is configured, and initialize got one, too: {choice}. Remove the other.")

    def __getattr__(self, name: str) -> Any:
        """An attribute of the engine, or of the module (``engine.generate``)."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module" or "module" not in self._modules:
                raise
            return getattr(self.module, name)

    # ---- a micro-batch -----------------------------------------------------------------------------------------

    @override
    def compile(
        self,
        backend: Any = "inductor",
        compile_kwargs: Mapping[str, Any] | None = None,
        schedule: Any = None,
        compiled_autograd_enabled: bool = False,
        **options: Any,
    ) -> None:
        """Compile the module, as ``engine.module.compile`` does; ``compile_kwargs`` and ``options`` are its options.

        Raises:
            ValueError: ``schedule`` or ``compiled_autograd_enabled`` is given, which are for DeepCompile.
        """
        given = {"schedule": schedule, "compiled_autograd_enabled": compiled_autograd_enabled}
        if name := next((name for name, value in given.items() if value), None):
            raise ValueError(
                f"engine.compile({name}={given[name]!r}) sets up DeepCompile, which is not in lt_zero. Remove the "
                "argument: the module is compiled by torch.compile."
            )
        self.module.compile(backend=backend, **(compile_kwargs or {}), **options)

    @property
    def is_compiled(self) -> bool:
        """True if ``compile`` was called for the module."""
        return is_compiled(self.module)

    # Under ``torch.compile(engine)`` the graph is that of the module's forward.
    @never_a_graph
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The output of the module; inputs are cast to the compute dtype where ``fp16.auto_cast`` says so."""
        policy = self.engine.policy
        trains = self.module.training and torch.is_grad_enabled()
        if policy.cast_inputs and policy.compute is not None:
            args, kwargs = (map_tensors(given, self._cast) for given in (args, kwargs))
        if trains and self._sharded is not None:
            self.loss_scale_controller.read_skip_flag()
            self.engine.set_requires_gradient_sync(self.is_gradient_accumulation_boundary() and not self._quiet)
        if self.session.trial is not None:
            self.session.trial.see_batch([args, kwargs])
        division = self.session.division
        inputs, named = division.cut_inputs(self.module, args, kwargs, trains)
        with ExitStack() as stack:
            if policy.autocast:
                stack.enter_context(within_step())
                stack.enter_context(torch.autocast(self.device.type, policy.compute))
            stack.enter_context(self.engine.forward_scope(trains))
            stack.enter_context(division.forward(self.module, trains))
            if self._turns is not None:
                stack.enter_context(self._turns.forward(trains))
            return self.module(*inputs, **named)

    def _cast(self, value: Tensor) -> Tensor:
        return value.to(self.engine.policy.compute) if value.is_floating_point() else value

    def scale(self, loss: Tensor) -> Tensor:
        """The loss times the loss scale, for a backward of one's own under fp16."""
        self._scaled = True
        return self.loss_scale_controller.scaled(self.engine, loss)

    def backward(self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> Tensor:
        """Add the gradients of a scalar loss, divided by the micro-batches of a step. Returns the loss divided so.

        ``scale_wrt_gas``: False: do not divide it.
        """
        if self._sharded is None:
            raise RuntimeError("engine.backward needs an optimizer: pass one to lt_zero.initialize, or configure one.")
        self._need_states("engine.backward")
        expect(loss, Tensor, "The loss of engine.backward", "pass a tensor with one element")
        if loss.numel() != 1:
            raise ValueError(
                f"The loss of engine.backward has the shape {tuple(loss.shape)}: pass one number, such as loss.mean()."
            )
        self.session.division.compare_loss(loss)
        scaled = self.scale(loss)
        self._note_loss(loss, (1.0 if scale_wrt_gas else self._gas) / self._added)
        with self.engine.backward_pass():
            (scaled if scale_wrt_gas else scaled * self._gas).backward(retain_graph=retain_graph)
        return loss.detach() / self._gas if scale_wrt_gas else loss.detach()

    def _note_loss(self, loss: Tensor, share: float) -> None:
        """Note a loss for monitors; of a round its mean, in the order of micro-batches. Collective then."""
        if self._turns is None or not self.monitor.enabled:
            self.monitor.add_loss(loss, share)
            return
        self._losses.append(loss.detach().reshape(()).float())
        if self._turns.is_last:
            first, *others = self.session.rounds.in_order(self._losses, "losses of a round")
            self._losses = []
            for other in others:
                first = first + other
            if self.global_rank == 0:
                self.monitor.add_loss(first.to(loss.device) / (len(others) + 1), share)

    def _begin_backward(self) -> None:
        assert self._sharded is not None
        self.loss_scale_controller.before_backward([self._sharded], factor=self._added)

    def _end_backward(self) -> None:
        """End a backward. See Note [Accumulation in a loop]."""
        if self._sharded is not None and self.is_gradient_accumulation_boundary() and not self._quiet:
            self._sharded.grads.carry(1.0)

    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        """Count a micro-batch; after the last one of a step clip, step the optimizer and the schedule, clear gradients.

        Raises:
            RuntimeError: no optimizer; inside ``no_sync``; or under fp16 the loss was not scaled.
            CheckpointError: on all ranks, before the step: the save in the background has failed.
        """
        if self._sharded is None or self.optimizer is None:
            raise RuntimeError("engine.step needs an optimizer: pass one to lt_zero.initialize, or configure one.")
        self._need_states("engine.step")
        if self._quiet:
            raise RuntimeError("engine.step() was called inside of engine.no_sync(). Call it after the context.")
        if self.loss_scale_controller.scaler is not None and not self._scaled:
            raise RuntimeError(
                "Under fp16 a loss has to be scaled: engine.backward(loss), or engine.scale(loss).backward()."
            )
        ends = self.is_gradient_accumulation_boundary()
        if ends:
            if self._turns is not None:
                self._turns.check_step("engine.step()")
            self.session.before_step()
        self._scaled = self._applied = False
        self._pending += 1
        self.micro_steps += self._pending % self.session.rounds.turns == 0
        if ends:
            self._step(self._sharded, self.optimizer, lr_kwargs or {})

    def _step(self, sharded: ShardedOptimizer, optimizer: Optimizer, lr_kwargs: Mapping[str, Any]) -> None:
        limit = self.gradient_clipping()
        self._skipped_before = self.skipped_steps
        self.monitor.begin_step(self.global_samples, self.loss_scale_controller)
        rates = self.get_lr()
        norm = self._own_norm(sharded) if self.tracks_norm and limit == 0 else None
        self._applied, self._norm = self.session.step(sharded, limit, optimizer.step)
        self._norm = norm if self._norm is None else self._norm
        optimizer.zero_grad()
        self.global_steps += 1
        self.global_samples += (self._micro or 1) * (self._pending // self.session.rounds.turns) * self.data_ranks
        self._pending = 0
        self.monitor.end_step(self.global_samples, rates, self._norm, self.loss_scale_controller)
        if self.lr_scheduler is not None and (self._applied or self._config.on_skipped_step == "advance"):
            self.lr_scheduler.step(**lr_kwargs)
        self.session.end_step(sharded)

    def _own_norm(self, sharded: ShardedOptimizer) -> Tensor | None:
        """The norm of the gradients for ``get_global_grad_norm``; None if the step computes it. Collective."""
        if self.loss_scale_controller.checks:
            return None
        self.engine.finish_reductions()
        return sharded.grads.unscaled_norm()

    def is_gradient_accumulation_boundary(self) -> bool:
        """True if the running micro-batch is the last one of a step."""
        return (
            self._boundary if self._boundary is not None else self._pending + 1 >= self._gas * self.session.rounds.turns
        )

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Decide ``is_gradient_accumulation_boundary`` from now on."""
        self._boundary = is_boundary
        # Accelerate calls it between the forward and the backward.
        self.engine.set_requires_gradient_sync(is_boundary and not self._quiet)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Context that lets each rank add up its gradients, unless they are sharded. ``step`` is an error inside.

        Raises:
            RuntimeError: it is entered inside of itself.
        """
        if self._quiet:
            raise RuntimeError("engine.no_sync() is entered inside of engine.no_sync(). Remove one of them.")
        self._quiet = True
        try:
            with self.engine.no_sync():
                yield
        finally:
            self._quiet = False

    def zero_grad(self, set_to_none: bool = True) -> None:
        if self.optimizer is not None:
            self.optimizer.zero_grad(set_to_none)

    # ---- data, and the end ------------------------------------------------------------------------------------

    def deepspeed_io(
        self, dataset: Dataset[Any], batch_size: int | None = None, collate_fn: Callable[[Any], Any] | None = None
    ) -> DataLoader[Any]:
        """A data loader with other samples on each rank, shuffled in the same way in each epoch.

        Raises:
            ConfigError: no batch size is configured.
        """
        size = batch_size or self._micro
        if size is None:
            key = _BATCH[1]
            raise ConfigError.about(key, f"training_data needs a batch size: write {key} or {_BATCH[0]}.")
        rounds = self.session.rounds
        number = self.session.division.data_rank if rounds.count is None else rounds.number(0)
        sampler: DistributedSampler[Any] = DistributedSampler(dataset, self.session.data_parts, number)
        loader = DataLoader(dataset, size, sampler=sampler, collate_fn=collate_fn)
        return loader if rounds.count is None else cast(Any, InTurns(rounds.loader(loader), rounds))

    def read_from(self, loader: DataLoader[Any]) -> None:
        """Make a data loader that of the training data."""
        self.training_dataloader = loader

    def destroy(self) -> None:
        """End the run on this rank, after the save in the background if there is one.

        The module stays sharded until ``initialize`` gets it again, or the engine is gone.

        Raises:
            CheckpointError: that save has failed.
        """
        self.reload_states()
        ended.add(self.engine)
        self.monitor.end(self.loss_scale_controller)
        self.engine.grad_views.abort()
        self.session.end()

    def wait_for_save(self) -> None:
        """Wait until the save in the background (``checkpoint.async``) is done. Collective.

        Raises:
            CheckpointError: on all ranks: it has failed.
        """
        self.session.wait_for_save("engine.wait_for_save")

    # ---- checkpoints -------------------------------------------------------------------------------------------

    def module_state_dict(self) -> dict[str, Any]:
        """The module's state dict with full weights on the CPU of rank 0, {} elsewhere. Collective."""
        self._need_states("engine.module_state_dict")
        return whole_weights(self.engine, "engine.module_state_dict")

    @without_gc
    @together
    def save_checkpoint(
        self,
        save_dir: str | os.PathLike[str],
        tag: str | int | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Write ``save_dir/tag``, and its name to ``save_dir/latest``. Collective.

        It loads at any number of ranks, stage and offload, and ``lt-zero export`` reads it. With ``checkpoint.async`` a
        thread writes it while training goes on, and the next step, save or load after it raises its errors.

        Args:
            tag: default ``global_step<n>``.
            client_state: returned by ``load_checkpoint``; plain values and tensors. What differs between ranks is saved
                for each rank.
            save_latest: whether ``latest`` names it.
            exclude_frozen_parameters: leave out weights that are not trained.

        Raises:
            CheckpointError: on all ranks, also if their tags differ; earlier checkpoints are kept.
        """
        self._need_states("engine.save_checkpoint")
        expect_path(save_dir, "engine.save_checkpoint(save_dir=...)")
        save_dir = save_dir or os.curdir
        self.world.roll_call("engine.save_checkpoint")
        tag = _same_tag(self.world, tag, "engine.save_checkpoint") or f"global_step{self.global_steps}"
        if tag == LATEST:
            text = f"tag={tag!r} is the name of the file that names the last checkpoint. Choose another"
            raise CheckpointError(f"engine.save_checkpoint({text}.")
        self.loss_scale_controller.read_skip_flag()
        engine = self.engine
        left_out = frozen_names(engine, exclude_frozen_parameters or not self._config.checkpoint.save_frozen)
        weights = weights_to_save(engine, left_out)
        schedules = [self.lr_scheduler.state_dict()] if self.lr_scheduler is not None else []
        content: dict[str, Any] = {
            "state_dict": weights,
            "optimizer_states": [optimizer_fragments(self._sharded)] if self._sharded is not None else [],
            "lr_schedulers": schedules,
            "global_step": self.global_steps,
            "epoch": 0,
            LOOP: {
                "micro_steps": self.micro_steps,
                "global_samples": self.global_samples,
                "loss_scale": self.loss_scale_controller.state_dict(),
                "client_state": dict(client_state or {}),
                OF_RANKS: values_of_ranks(self.world, client_state or {}),
            },
        }
        content |= beside({"": engine})
        names = [parameter_names(self.optimizer, engine)] if self.optimizer is not None else []
        then = partial(name_latest, save_dir, tag) if save_latest else lambda path: None
        about = self._config, self._shown, engine.policy.mode, left_out
        saving = Saving(content, names, *about, then, self.session.division.peers.ranks)
        self.session.save(saving, inside(save_dir, tag))
        return True

    @together
    def load_checkpoint(
        self,
        load_dir: str | os.PathLike[str],
        tag: str | int | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Any = None,
    ) -> tuple[str | None, dict[str, Any]]:
        """Load ``load_dir/tag`` (default: the tag in ``load_dir/latest``). Collective.

        Gradients are cleared: the next micro-batch is the first one of a step.

        Returns its path and its client state; (None, {}) if there is no ``latest``.

        Raises:
            CheckpointError: on all ranks; before anything is loaded if tags differ, or the optimizer does not fit.
            ValueError: ``custom_load_fn`` is given, an argument of DeepSpeed's.
        """
        self._need_states("engine.load_checkpoint")
        expect_path(load_dir, "engine.load_checkpoint(load_dir=...)")
        load_dir = load_dir or os.curdir
        if custom_load_fn is not None:
            raise ValueError(
                f"engine.load_checkpoint(custom_load_fn={custom_load_fn!r}) is not supported: weights are read part by "
                "part, and no rank has all of them. Change the weights inside of lt_zero.gathered(module, write=True) "
                "after loading, or load with load_module_strict=False."
            )
        world = self.world
        world.roll_call("engine.load_checkpoint")
        named = _same_tag(world, tag, "engine.load_checkpoint")
        self.session.saver.wait(world)  # it may be the one being written
        if named is None:
            named = latest_of(world, load_dir)
        if named is None:
            return None, {}
        path = inside(load_dir, named)
        saved = load_same(world, path, partial(opened_source, path, as_lightning, world.rank == 0))
        own = entries_of(saved, LOOP)
        how = self._config.checkpoint
        goes_on = not (load_module_only or how.load_module_only)
        with_states = goes_on and load_optimizer_states and how.load_optimizer_states
        with_schedule = goes_on and load_lr_scheduler_states and how.load_lr_scheduler_states
        weights = trained_weights(saved) if goes_on else saved["state_dict"]
        left_out = saved.get("lt_zero", {}).get("frozen_left_out", [])
        rounded = not self._config.zero_optimization.load_from_fp32_weights
        part = ModuleContents(self.module, self.engine, weights, load_module_strict, left_out, rounded)
        if with_states and self.optimizer is not None:
            part = part.going_on(saved, {0: (self.optimizer, _only_state(saved, path))})
        schedules = saved.get("lr_schedulers") if with_schedule else []
        has_schedule = self.lr_scheduler is not None
        contents = Contents(
            (part,),
            loss_scale=loss_scale(saved) if part.optimizers else None,
            scaled=(self.engine,),
            schedules=[(self.lr_scheduler, schedules[0])] if schedules and has_schedule else [],
            path=path,
        )
        restore(contents, world, self.loss_scale_controller)
        self.zero_grad()  # of other weights
        self._pending = 0
        self._scaled = False
        if goes_on:
            self.global_steps = int(own.get("global_steps", saved.get("global_step", 0)))
            self.micro_steps = int(own.get("micro_steps", self.global_steps * self._gas))
            self.global_samples = int(own.get("global_samples", 0))
        if with_schedule and has_schedule != bool(schedules) and world.rank == 0:
            has = "a schedule, and the engine has none" if schedules else "no schedule, and the engine's begins anew"
            warn(f"The checkpoint {path} has {has}. load_lr_scheduler_states=False expects so.")
        return path, own_values(world, own.get("client_state", {}), own.get(OF_RANKS, {}))

    def save_16bit_model(
        self, save_dir: str | os.PathLike[str], save_filename: str = "pytorch_model.bin", **options: Any
    ) -> bool:
        """Write all weights to one file in 16 bits (bf16 if the model computes in it). Collective.

        ``options``: as for ``lt_zero.export``.

        Raises:
            CheckpointError, ValueError: on all ranks.
        """
        self._need_states("engine.save_16bit_model")
        with self.world.agree("making the folder", CheckpointError):
            if self.world.rank == 0 and not is_url(save_dir):
                Path(plain_path(save_dir)).mkdir(parents=True, exist_ok=True)
        dtype = torch.bfloat16 if self.bfloat16_enabled() else torch.float16
        self.world.roll_call("save_16bit_model")
        export_weights(self.engine, inside(save_dir, save_filename), **{"dtype": dtype, **options})
        return True

    save_fp16_model = save_16bit_model

    def zero_gather_16bit_weights_on_model_save(self) -> bool:
        """True if ``Trainer.save_model`` of transformers writes whole weights at stage 3, as the configuration says."""
        return self._config.zero_optimization.stage3_gather_16bit_weights_on_model_save

    def _zero3_consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Any]:
        """The state dict that transformers and Accelerate save: in the dtypes of the module, {} on other ranks than 0.

        Collective.
        """
        self._need_states("engine._zero3_consolidated_16bit_state_dict")
        left_out = frozen_names(self.engine, exclude_frozen_parameters)
        state = whole_weights(self.engine, "engine._zero3_consolidated_16bit_state_dict", left_out)
        for name, parameter in plain_names.named_parameters(self.module):
            if name in state:
                state[name] = state[name].to(parameter.dtype)
        return state

    _consolidated_16bit_state_dict = _zero3_consolidated_16bit_state_dict  # Accelerate's call with tensor parallelism


def _batch_sizes(config: ZeroConfig, world: int) -> tuple[int | None, int]:
    """The micro-batch (None: unknown) and the micro-batches of a step that the three keys mean, as in DeepSpeed.

    Raises:
        ConfigError: they contradict each other.
    """
    total, micro, gas = (getattr(config, key) for key in _BATCH)
    if total is not None and total % ((micro or 1) * (gas or 1) * world):
        text = f"train_batch_size={total} is not a multiple of micro-batch * accumulation * ranks = "
        raise ConfigError.about(_BATCH[0], f"{text}{micro or 1} * {gas or 1} * {world}. Change one of them.")
    if total is not None:
        rest = total // ((micro or 1) * (gas or 1) * world)
        if micro is not None and gas is not None and rest != 1:
            text = f"train_batch_size={total}, but {micro} * {gas} * {world} ranks = {micro * gas * world}"
            raise ConfigError.about(_BATCH[0], f"{text}. Remove one of the three keys.")
        gas = gas or (rest if micro is not None else 1)
        micro = micro or total // (gas * world)
    return micro, gas or 1


def _same_tag(world: World, tag: str | int | None, call: str) -> str | None:
    """The tag as text; None for the default. Collective.

    Raises:
        CheckpointError: on all ranks: their tags differ.
    """
    own = None if tag is None or tag == "" else str(tag)
    every = world.host_gather(own, f"the tag of {call}")
    other = next((rank for rank, one in enumerate(every) if one != every[0]), None)
    if other is not None:
        text = f"rank 0 has tag={every[0]!r}, and rank {other} tag={every[other]!r}. Pass the same tag on all ranks"
        raise CheckpointError(f"{call}: {text}.")
    return own


def _only_state(saved: Mapping[str, Any], path: str) -> Any:
    """The saved state of the only optimizer.

    Raises:
        CheckpointError: there are several, or none.
    """
    states = saved.get("optimizer_states", [])
    if len(states) != 1:
        text = f"has {len(states)} optimizers, and the engine one. Load with load_optimizer_states=False"
        raise CheckpointError(f"The checkpoint {path} {text}.")
    return states[0]
