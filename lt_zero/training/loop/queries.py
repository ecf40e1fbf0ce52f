"""Answers of a ``TrainingEngine`` about its run, by the names of DeepSpeed's engine (0.19)."""

from __future__ import annotations

from collections.abc import Container
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lt_zero.common.places import import_public
from lt_zero.common.users_code import warn
from lt_zero.config import ZeroConfig
from lt_zero.config.load import resolved
from lt_zero.core.engine.engine import Engine
from lt_zero.core.step.loss_scale import LossScaleController
from lt_zero.training.session import Session

if TYPE_CHECKING:
    from lt_zero.features.offload.moved_states import MovedStates


class EngineQueries(nn.Module):
    """Base of engines: their configuration, counters, ranks and last step, as they are asked for."""

    engine: Engine
    session: Session
    optimizer: Optimizer | None
    loss_scale_controller: LossScaleController
    data_ranks: int
    tracks_norm: bool
    _config: ZeroConfig
    _micro: int | None
    _gas: int
    _applied: bool
    _pending: int
    _skipped_before: int
    _norm: Tensor | None
    _moved: MovedStates | None = None  # since the first ``offload_states``

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Raise TypeError: an engine is neither copied nor pickled, its module is."""
        raise TypeError(
            "An engine of lt_zero.initialize cannot be copied or pickled: it has process groups, and this rank's part "
            "of the states. Copy engine.module (at stage 3 inside of lt_zero.gathered(engine.module)); save "
            "engine.module_state_dict(), whole weights on rank 0, or call engine.save_checkpoint."
        )

    # ---- the last step ---------------------------------------------------------------------------------------------

    @property
    def config(self) -> dict[str, Any]:
        """The configuration as it is used."""
        return resolved(self._config)

    @property
    def skipped_steps(self) -> int:
        return self.loss_scale_controller.skipped

    def loss_scale(self) -> float:
        """The current loss scale; 1 without fp16."""
        return self.loss_scale_controller.scale

    def was_step_applied(self) -> bool:
        """True if the last ``step`` changed the weights."""
        self.loss_scale_controller.read_skip_flag()
        return self._applied and self.skipped_steps == self._skipped_before

    def get_global_grad_norm(self) -> float | None:
        """The norm of the last step's gradients before clipping.

        None if it was not computed: without ``gradient_clipping``, checks of steps and ``tracks_norm``.
        """
        return None if self._norm is None else float(self._norm)

    def get_lr(self) -> list[float]:
        return [group["lr"] for group in self._groups()]

    def get_mom(self) -> list[Any]:
        return [group.get("betas", group.get("momentum", 0.0)) for group in self._groups()]

    def _groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups if self.optimizer is not None else []

    def train_batch_size(self) -> int | None:
        return None if self._micro is None else self._micro * self._gas * self.data_ranks

    def train_micro_batch_size_per_gpu(self) -> int | None:
        return self._micro

    def gradient_accumulation_steps(self) -> int:
        return self._gas

    def gradient_clipping(self) -> float:
        return float(self._config.gradient_clipping or 0.0)

    def zero_optimization_stage(self) -> int:
        return self._config.zero_optimization.stage

    def fp16_enabled(self) -> bool:
        return self.engine.policy.compute == torch.float16

    def bfloat16_enabled(self) -> bool:
        return self.engine.policy.compute == torch.bfloat16

    def dynamic_loss_scale(self) -> bool:
        """True if overflows change the loss scale."""
        scaler = self.loss_scale_controller.scaler
        return scaler is not None and scaler.rules.dynamic

    def zero_optimization(self) -> bool:
        """True if something is sharded."""
        return self.zero_optimization_stage() > 0

    def optimizer_name(self) -> str | None:
        """The configured ``optimizer.type``; None if there is none."""
        return None if self._config.optimizer is None else str(self._config.optimizer.type)

    def scheduler_name(self) -> str | None:
        """The configured ``scheduler.type``; None if there is none."""
        return None if self._config.scheduler is None else str(self._config.scheduler.type)

    def steps_per_print(self) -> int | None:
        """The configured ``steps_per_print``, for prints of the loop: the engine prints nothing."""
        return self._config.steps_per_print

    def wall_clock_breakdown(self) -> bool:
        """The configured ``wall_clock_breakdown``, for the loop: the engine measures nothing."""
        return bool(self._config.wall_clock_breakdown)

    def get_batch_info(self) -> tuple[int | None, int | None, int]:
        """Samples of a step and of a micro-batch (None: unknown), and micro-batches of a step."""
        return self.train_batch_size(), self._micro, self._gas

    # ---- ranks -----------------------------------------------------------------------------------------------------

    @property
    def data_parallel_group(self) -> Any:
        """The process group of the ranks that see different data; None, as torch means it: all ranks."""
        return self.session.division.data_group

    @property
    def dp_world_size(self) -> int:
        """The number of ranks, or sets of tensor-parallel ranks, that see different data."""
        return self.data_ranks

    @property
    def mp_world_size(self) -> int:
        """The number of ranks that tensors are cut over."""
        return self._config.tensor_parallel.autotp_size or 1

    def get_data_parallel_rank(self) -> int:
        return self.session.division.data_rank

    def get_model_parallel_rank(self) -> int:
        return self.session.division.part_rank

    get_tensor_parallel_rank = get_model_parallel_rank

    # ---- by hand ---------------------------------------------------------------------------------------------------

    def empty_partition_cache(self) -> None:
        """Release all weights that are gathered."""
        self.engine.gatherer.release_all()

    def allreduce_gradients(self, bucket_size: int | None = None) -> None:
        """Reduce the gradients that are not reduced yet, which ``step`` does otherwise. Collective."""
        self.engine.finish_reductions()

    # ---- states in host memory between steps -----------------------------------------------------------------------

    def _need_states(self, call: str) -> None:
        """Raise RuntimeError if states are in host memory; ``call`` needs them."""
        if self._moved is not None:
            self._moved.refuse(call)

    def offload_states(
        self,
        include: Container[Any] | None = None,
        device: Any = "cpu",
        pin_memory: bool = True,
        non_blocking: bool = False,
    ) -> None:
        """Move states to host memory between two steps, until ``reload_states``; their values are kept bit for bit.

        Meanwhile the device has memory for something else, and weights can be read, on the CPU. No-op for what the
        configuration offloads, and where the device is the CPU.

        Args:
            include: kinds of states, as text or members of DeepSpeed's ``OffloadStateTypeEnum``: ``optim_states``,
                ``hp_params`` (master weights), ``lp_params`` (weights of the forward), ``lp_grads`` and
                ``contiguous_grad_buffer``, which take no memory after a step. None: all of them.
            device: "cpu"; "none" moves nothing.
            pin_memory: whether to pin the memory, on a GPU.
            non_blocking: without effect, the copies are complete when this returns.

        Raises:
            RuntimeError: between the micro-batches of a step; states are away already; the engine has no optimizer.
            ValueError: a kind or the device is unknown.
        """
        module = import_public("lt_zero.features.offload.moved_states", "engine.offload_states")
        kinds, place = module.kinds_of(include, "engine.offload_states"), str(getattr(device, "value", device))
        if place not in ("cpu", "none"):
            raise ValueError(
                f"engine.offload_states(device={place!r}): states move to host memory. Pass 'cpu'; for files write "
                "zero_optimization.offload_optimizer.device=nvme."
            )
        if self.optimizer is None:
            raise RuntimeError("engine.offload_states needs an optimizer: pass one to lt_zero.initialize.")
        self.engine.grad_views.drop_cleared()
        if any(bucket.grads.held for bucket in self.engine.buckets) or self._pending:
            raise RuntimeError(
                "engine.offload_states was called between the micro-batches of a step, or before engine.step(): there "
                "are gradients that the step needs. Call it after the step."
            )
        if place == "none":
            warn("engine.offload_states(device='none') moves nothing.")
            return
        moved = self._moved or module.MovedStates(self.engine)
        self._moved = moved
        moved.offload(kinds, self.optimizer, pin_memory)

    def reload_states(self, non_blocking: bool = False) -> None:
        """Move states back to where they were before ``offload_states``. No-op if none is away."""
        if self._moved is not None:
            self._moved.reload()
