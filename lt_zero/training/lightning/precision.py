"""The precision plugin: dtypes of forward, loss scaling, and unscaling and clipping before the step."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from lightning.fabric import plugins as fabric
from lightning.fabric.accelerators.cpu import CPUAccelerator as FabricCPUAccelerator
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins import DoublePrecision, HalfPrecision, MixedPrecision, Precision
from lightning.pytorch.trainer.call import _call_lightning_module_hook
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.amp import GradScaler
from torch.optim import Optimizer
from typing_extensions import override

from lt_zero.common import accelerator
from lt_zero.common.compat import announce_compute_dtype, asked_precision, is_plain_closure, logged_step, override_dtype
from lt_zero.common.phases import phase
from lt_zero.config import ZeroConfig
from lt_zero.config.precision import MODES, dtype_policy, resolve_mode
from lt_zero.core.engine.dtypes import DtypePolicy, ScalerRules
from lt_zero.core.engine.materialize import parameters_in
from lt_zero.core.step.sharded_optimizer import RanClosure, ShardedOptimizer
from lt_zero.training.loss_scale import loss_scale_controller

if TYPE_CHECKING:
    from lt_zero.core.engine.engine import Engine
    from lt_zero.core.step.loss_scaler import LossScaler
    from lt_zero.training.lightning.turns.trainer import TrainerTurns


_CPUS = (CPUAccelerator, FabricCPUAccelerator)
_STOCK = (
    *(Precision, HalfPrecision, MixedPrecision, DoublePrecision),
    *(fabric.Precision, fabric.HalfPrecision, fabric.MixedPrecision, fabric.DoublePrecision),
)


def sharded_of(optimizer: Any) -> ShardedOptimizer | None:
    """The ``ShardedOptimizer`` of an optimizer (or of Lightning's wrapper around it), or None."""
    if isinstance(optimizer, LightningOptimizer):
        optimizer = optimizer.optimizer
    return ShardedOptimizer.of(optimizer)


class ZeroPrecision(HalfPrecision):
    """``Trainer(precision=...)`` under ZeRO.

    * ``32-true``: weights in the module's dtype.
    * ``64-true``: weights, buffers, inputs, gradients and states in fp64.
    * ``16-true``, ``bf16-true``: weights, inputs and activations in 16 bits.
    * ``16-mixed``, ``bf16-mixed``: weights in 16 bits, and autocast: losses and other operations of its fp32 list stay
      in fp32. Weights are already in 16 bits, so autocast does not copy them.

    In 16 bits, master weights, optimizer states and gradient accumulators are fp32 unless configured otherwise, and
    buffers keep their dtype. fp16 uses loss scaling in both modes. In the true modes, parameters that are created in
    ``configure_model`` or ``Trainer.init_module`` are in 16 bits, unless they may become fp32 master weights, which
    then start at full precision.

    Args:
        precision: one of the above.
        scaler: provides initial scale, growth and backoff.

    Raises:
        ValueError: the precision is not supported.
    """

    def __init__(self, precision: str = "32-true", scaler: GradScaler | None = None) -> None:
        if precision not in MODES:
            raise ValueError(
                f"precision={precision!r} is not supported by ZeroStrategy. Use one of {', '.join(MODES)}."
            )
        super().__init__()
        self.engine: Engine | None = None
        self.turns: TrainerTurns | None = None  # None: there are no rounds
        # 0D, before clipping, of the last step that was clipped by norm or checked for overflow
        self.grad_norm: Tensor | None = None
        self.device_type = "cpu"
        self._module_dtypes: list[tuple[torch.nn.Module, torch.dtype]] = []  # ``dtype`` of modules before the run
        self._rules = _rules_of(scaler)
        self._norms: dict[str, Tensor] = {}
        # The optimizer that steps after the running closure.
        self._steps_next: ShardedOptimizer | None = None
        self.configure(ZeroConfig(), precision)

    def __getstate__(self) -> dict[str, Any]:
        """A copy has no run."""
        return {**vars(self), "engine": None, "turns": None, "_steps_next": None}

    @classmethod
    def of(cls, plugin: fabric.Precision) -> ZeroPrecision:
        """The equivalent of a stock plugin of Lightning or Fabric.

        Raises:
            TypeError: this precision is not supported.
        """
        if isinstance(plugin, ZeroPrecision):
            return plugin
        if type(plugin) not in _STOCK:
            raise TypeError(
                f"ZeroStrategy does not support {type(plugin).__name__} (precision={plugin.precision!r}). "
                f"Use one of {', '.join(MODES)}."
            )
        return cls(plugin.precision, getattr(plugin, "scaler", None))

    @classmethod
    def configured(cls, plugin: fabric.Precision, config: ZeroConfig, chosen: Any) -> ZeroPrecision:
        """``of`` for a run on Lightning's accelerator ``chosen``. Errors are those of ``of`` and ``configure``."""
        made = cls.of(plugin)
        on_host = isinstance(chosen, _CPUS) or not accelerator.is_available()
        made.configure(config, device_type="cpu" if on_host else accelerator.default_kind().type)
        return made

    def configure(self, config: ZeroConfig, precision: str | None = None, device_type: str = "cpu") -> None:
        """Check and apply the ``fp16``, ``bf16`` and ``data_types`` blocks.

        Raises:
            ValueError: they contradict the precision.
        """
        self.device_type = device_type
        mode = resolve_mode(config, precision or self.precision, asked_precision())
        self.policy: DtypePolicy = dtype_policy(config, mode, self._rules if MODES[mode][0] == torch.float16 else None)
        self.loss_scale_controller = loss_scale_controller(config, self.policy)
        self.precision: str = mode  # type: ignore[assignment]
        announce_compute_dtype(self, self.policy.compute or torch.float32)

    @property
    def skipped_steps(self) -> int:
        """Number of optimizer steps skipped for non-finite gradients."""
        return self.loss_scale_controller.skipped

    @property
    def loss_scale(self) -> float:
        """The current loss scale; 1 without fp16."""
        return self.loss_scale_controller.scale

    @property
    def device(self) -> str:
        """The device type, as in Lightning's ``MixedPrecision``."""
        return self.device_type

    @property
    def scaler(self) -> LossScaler | None:
        """The loss scaler, with the getters of a ``GradScaler``; None without fp16."""
        return self.loss_scale_controller.scaler

    # ---- forward -----------------------------------------------------------------------------------------------

    @override
    def convert_module(self, module: torch.nn.Module) -> torch.nn.Module:
        if self.policy.compute is not None and not self.policy.autocast:
            self._module_dtypes = self._module_dtypes or override_dtype(module, self.policy.compute)
        return module  # parameters are cast when gathered

    def init_context(self, trains: bool) -> AbstractContextManager[Any]:
        """Context for constructing modules; ``trains``: their parameters may become master weights."""
        policy = self.policy
        if policy.compute == torch.float64:
            return super().tensor_init_context()
        # Buffers keep their dtype, and so do all parameters until the fp32 modules are known.
        if policy.compute is None or policy.autocast or policy.keep_fp32 or (trains and not policy.low_master):
            return nullcontext()
        return parameters_in(policy.compute)

    @override
    def tensor_init_context(self) -> AbstractContextManager[Any]:
        return self.init_context(trains=True)

    @override
    def module_init_context(self) -> AbstractContextManager[Any]:
        return self.init_context(trains=True)

    def autocast_context_manager(self) -> torch.autocast:
        """Autocast of Lightning's ``MixedPrecision``; no effect in the true modes."""
        enabled, dtype = self.policy.autocast, self.policy.compute
        return torch.autocast(self.device_type, dtype=dtype if enabled else None, enabled=enabled, cache_enabled=False)

    @contextmanager
    @override
    def forward_context(self) -> Generator[None, None, None]:
        if self.policy.autocast:
            from lt_zero.core.engine.outside_steps import within_step

            with within_step(), self.autocast_context_manager():
                yield
        elif self.policy.compute is not None:
            with super().forward_context():  # tensors created in forward get the compute dtype
                yield
        else:
            yield

    @override
    def convert_input(self, data: Any) -> Any:
        if self.turns is not None:
            data = self.turns.unpack(data)
        return super().convert_input(data) if self.policy.cast_inputs else data

    @override
    def convert_output(self, data: Any) -> Any:
        """Outputs of a forward, floats in torch's default dtype; Fabric calls it, so that losses are in fp32."""
        return data if self.policy.compute is None else fabric.DoublePrecision().convert_output(data)

    # ---- backward ----------------------------------------------------------------------------------------------

    @override
    def pre_backward(self, tensor: Tensor, module: LightningModule) -> Tensor:  # type: ignore[override]
        controller, known = self.loss_scale_controller, map(sharded_of, module.trainer.strategy.optimizers)
        controller.before_backward([sharded for sharded in known if sharded is not None])
        scaled = controller.scaled(self.engine, tensor)
        if self.turns is None:
            return super().pre_backward(scaled, module)
        _call_lightning_module_hook(module.trainer, "on_before_backward", scaled)
        return scaled

    @override
    def backward(  # type: ignore[override]
        self, tensor: Tensor, model: LightningModule, optimizer: Any, *args: Any, **kwargs: Any
    ) -> None:
        # Of a round only the backward of the last turn is followed by a step.
        steps = self._steps_next if self.turns is None or self.turns.is_last else None
        overlap = steps.overlap.beside_backward() if steps is not None else nullcontext()
        with overlap, self.engine.backward_pass() if self.engine is not None else nullcontext():
            super().backward(tensor, model, optimizer, *args, **kwargs)

    @override
    def post_backward(self, tensor: Tensor, module: LightningModule) -> Tensor:  # type: ignore[override]
        if self.turns is None:
            return super().post_backward(tensor, module)
        _call_lightning_module_hook(module.trainer, "on_after_backward")
        return tensor.detach()

    # ---- step --------------------------------------------------------------------------------------------------

    @override
    def optimizer_step(  # type: ignore[override]
        self, optimizer: Any, model: LightningModule, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        # Run the closure before step, not inside: step works on shards, forward and backward on parameters.
        sharded = sharded_of(optimizer)
        if sharded is None:
            return super().optimizer_step(optimizer, model, closure, **kwargs)
        # A closure other than Lightning's may run user code between backward and step.
        plain = is_plain_closure(closure)
        self._steps_next = sharded if plain and not self._looked_at(model) else None
        try:
            ran = RanClosure(type(optimizer).__name__, closure())
        finally:
            self._steps_next = None
        # Lightning passes no closure to optimizers that take none.
        parameters = inspect.signature(optimizer.step).parameters.values()
        takes_closure = any(p.name == "closure" or p.kind is p.VAR_KEYWORD for p in parameters)
        if takes_closure:
            kwargs = {**kwargs, "closure": ran}
        controller = self.loss_scale_controller
        known = model.trainer.strategy.optimizers
        output = ran.result
        with phase("step"):
            if model.trainer.gradient_clip_algorithm != "value":
                sharded.grads.expect_clipping(float(model.trainer.gradient_clip_val or 0.0))
            controller.examine(sharded)
            self.grad_norm = controller.norm if controller.norm is not None else self.grad_norm
            self._after_closure(model, optimizer)
            if taken := controller.proceeds(sharded):
                controller.unscale(sharded)  # unless clipping did
                try:
                    output = optimizer.step(**kwargs)
                finally:
                    sharded.widen()
            controller.conclude(sharded, next(i for i, other in enumerate(known) if sharded_of(other) is sharded))
            self._log(model.trainer, skipped=not taken)
        if taken and plain and takes_closure and not ran.called and controller.scaler is None:
            raise MisconfigurationException(  # Lightning's error: there are no gradients
                f"The closure hasn't been executed by {ran.name}.step. HINT: pass it to the step of the parent class."
            )
        return output

    def _looked_at(self, model: LightningModule) -> bool:
        """True if user code reads, changes or keeps gradients between backward and step."""
        clips = bool(model.trainer.gradient_clip_val) or self.loss_scale_controller.checks
        own = any(is_overridden(hook, model) for hook in ("backward", "optimizer_zero_grad"))
        return clips or own or _looks_at_gradients(model, "on_after_backward")

    @override
    def _after_closure(self, model: LightningModule, optimizer: Any) -> None:
        sharded = sharded_of(optimizer)
        if sharded is None or not _looks_at_gradients(model):
            super()._after_closure(model, optimizer)
            return
        self.loss_scale_controller.unscale(sharded)
        self.loss_scale_controller.forget_norm()
        with sharded.engine.unused_parameters.user_access():
            super()._after_closure(model, optimizer)

    @override
    def clip_grad_by_value(self, optimizer: Optimizer, clip_val: int | float) -> None:
        sharded = sharded_of(optimizer)
        if sharded is None:
            super().clip_grad_by_value(optimizer, clip_val)
        else:
            self.loss_scale_controller.clip_value(sharded, float(clip_val))

    @override
    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: int | float) -> None:
        sharded = sharded_of(optimizer)
        if sharded is None:
            super().clip_grad_by_norm(optimizer, clip_val)
            return
        norm = self.loss_scale_controller.clip_norm(sharded, float(clip_val))
        if norm is not None:
            self.grad_norm = norm
            self._norms = {"grad_norm": norm, "grad_norm_clipped": norm.clamp(max=float(clip_val))}

    def _log(self, trainer: Trainer, skipped: bool) -> None:
        """Log directly to the loggers: ``self.log`` is not allowed at this point of Lightning's loop."""
        norms, self._norms = self._norms, {}
        every: int = trainer.log_every_n_steps  # type: ignore[attr-defined]
        if not trainer.loggers or every == 0 or (trainer.global_step % every and not skipped):
            return
        controller = self.loss_scale_controller
        # The flag is on the device: only now does the host learn that the step was skipped.
        norms = {} if controller.read_skip_flag() else norms
        read = torch.stack([*norms.values()]).tolist() if norms else []
        values: dict[str, float] = dict(zip(norms, read, strict=True))
        if controller.scaler is not None:
            values["loss_scale"] = controller.scale
        if controller.checks and (controller.scaler is not None or controller.skipped):
            values["skipped_steps"] = controller.skipped
        for logger in trainer.loggers if values else []:
            logger.log_metrics(values, step=logged_step(trainer))

    # ---- checkpoints and the end -------------------------------------------------------------------------------

    @override
    def state_dict(self) -> dict[str, Any]:
        return self.loss_scale_controller.state_dict()

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        from lt_zero.training.restore import Contents, restore  # a run that loads nothing does without it

        scaled = [self.engine] if self.engine is not None else []
        restore(Contents(loss_scale=state_dict, scaled=scaled), None, self.loss_scale_controller)

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Take over the loss scale of a DDP run, which Lightning saves under the name of its own plugin."""
        saved, scaler = checkpoint.get("MixedPrecision"), self.loss_scale_controller.scaler
        if saved and scaler is not None and scaler.rules.dynamic and type(self).__qualname__ not in checkpoint:
            scaler.go_on_at(saved["scale"])

    @override
    def teardown(self) -> None:
        self.loss_scale_controller.stop_watching()
        for module, dtype in self._module_dtypes:
            override_dtype(module, dtype)
        self._module_dtypes = []


def _rules_of(scaler: GradScaler | None) -> ScalerRules | None:
    """The rules of a ``GradScaler``; None if it has torch's defaults."""
    if scaler is None:
        return None
    if not scaler.is_enabled():
        return ScalerRules(initial=1.0, dynamic=False)
    given, default = (
        (s.get_scale(), s.get_growth_interval(), s.get_growth_factor(), s.get_backoff_factor())
        for s in (scaler, GradScaler("cpu"))
    )
    if given == default:
        return None
    scale, interval, growth, backoff = given
    # A GradScaler has no minimum. Scales below this one only lose precision.
    smallest = 2.0**-24
    return ScalerRules(scale, window=interval, hysteresis=1, minimum=smallest, growth=growth, backoff=backoff)


def _looks_at_gradients(model: LightningModule, *others: str) -> bool:
    """True if user code runs between backward and step; ``others``: further hooks to check."""
    hooks = ("on_before_optimizer_step", *others)
    if any(is_overridden(hook, model) for hook in (*hooks, "configure_gradient_clipping")):
        return True
    callbacks = model.trainer.callbacks  # type: ignore[attr-defined]
    return any(is_overridden(hook, callback, parent=Callback) for callback in callbacks for hook in hooks)
