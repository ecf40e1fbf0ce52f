"""The exchange of gradients that are added in one order (fold.py)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NoReturn

from torch.optim import Optimizer
from typing_extensions import override

from lt_zero import kernels as ops
from lt_zero.common.errors import ConfigError
from lt_zero.core.comm.shard_group import ShardGroup
from lt_zero.core.engine.bucket import Bucket
from lt_zero.core.engine.exchange import OptimizerFragments, PlainExchange
from lt_zero.core.engine.exchange_plan import ExchangePlan
from lt_zero.core.engine.optimizer_spec import NormedOptimizer
from lt_zero.core.step.fused_step import FusedStep

_ALONG = "zero_optimization.shard_along"


class FoldPlan(ExchangePlan):
    """Plan of an exchange that adds the contributions of each backward to the accumulators.

    ``fused_step``: of the configuration.
    """

    def __init__(self, fused_step: bool) -> None:
        self._fused_step = fused_step

    @property
    @override
    def reduces_each_backward(self) -> bool:
        return True

    @override
    def make(self, peers: ShardGroup, groups: Iterable[ShardGroup]) -> FoldExchange:
        return FoldExchange(peers, self._fused_step)


class FoldExchange(PlainExchange):
    """Reduces each backward by itself, once. The transport of the group adds in order.

    Args:
        peers: the ranks with the same model.
        fused_step: kernels step the optimizers that they can.
    """

    def __init__(self, peers: ShardGroup, fused_step: bool) -> None:
        super().__init__(peers)
        self._fused_step = fused_step
        self._cuts = False  # shards cut through parameters, at places that depend on the number of ranks

    @override
    def bind(self, buckets: Sequence[Bucket]) -> None:
        self._cuts = any(bucket.storage.is_cut and bucket.plan.owners is None for bucket in buckets)

    @override
    def connect(self, optimizer: Optimizer, fragments: OptimizerFragments) -> None:
        """Serve ``optimizer``.

        Raises:
            ConfigError: its step has other bits where a parameter is cut.
        """
        super().connect(optimizer, fragments)
        if not self._cuts:
            return
        name = type(optimizer).__name__
        text = f"{_ALONG}=element cuts parameters where their number of elements and ranks says, and "
        if isinstance(optimizer, NormedOptimizer) and not optimizer.takes_parts:
            raise ConfigError.about(
                _ALONG,
                f"{text}{name} adds up the squares of each part of a parameter itself, so that its steps depend on the "
                f"number of ranks. With reproducible.virtual_ranks set {_ALONG}=parameter, or let {name} take norms by "
                "`Norms.part` (takes_parts).",
            )
        has_kernel = self._fused_step and FusedStep.operation_of(optimizer) and ops.available(self._peers.device)
        if not has_kernel and any(group.get("fused") for group in optimizer.param_groups):
            raise ConfigError.about(
                _ALONG,
                f"{text}torch's fused step of {name} rounds the last elements of a part in another way. With "
                f"reproducible.virtual_ranks pass fused=False to {name}, set fused_step=true, or {_ALONG}=parameter.",
            )

    @property
    @override
    def reduces_each_backward(self) -> bool:
        return True

    @override
    def refuse_second_reduction(self, names: str) -> NoReturn:
        raise RuntimeError(
            f"Gradients of {names} came after they were reduced, or were set after backward. "
            "reproducible.virtual_ranks adds the gradients of each micro-batch once, in one order. Use a weight inside "
            "of the forward of its own module, set p.grad in a hook of the parameter instead of after backward, or "
            "remove the key."
        )
