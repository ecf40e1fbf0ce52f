"""The exchange of gradients between the ranks of an engine: one protocol, and the plain way, which is the mean.

An engine is built with one of these objects, which decides everything that is not the mean of each step's gradients.
Nothing in the core asks which one it is. The others are in ``features/``. ``ExchangePlan`` (exchange_plan.py) makes it.

Note [Questions to an exchange]
    Some exchanges have no mean gradient at a time when a step, or the user, wants one. What relies on it asks first
    (``check_clipping``, ``check_mean``, ``check_common_weights``), and the exchange raises the error, as it knows the
    remedy. What a step then computes in another way has a question of its own (``ranks_step_apart``,
    ``clips_before_exchange``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NoReturn, Protocol

from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from lt_zero.core.comm.residuals import Residuals
from lt_zero.core.comm.shard_group import ShardGroup
from lt_zero.core.comm.transport import Replicas, SendBuffer
from lt_zero.core.comm.work import Work
from lt_zero.core.engine.bucket import Bucket
from lt_zero.core.engine.optimizer_spec import ExchangingOptimizer


class OptimizerFragments(Protocol):
    """The view of an optimizer's fragments that an exchange needs (core/step/param_groups.py)."""

    def groups(self) -> list[list[Parameter]]:
        """The module's parameters, by group."""

    def places(self) -> list[tuple[Bucket, int, Parameter]]:
        """Bucket, index in it and parameter, of those in buckets."""

    def of(self, parameter: Parameter) -> list[Parameter]:
        """This rank's fragment of a parameter: none or one."""


class BucketResiduals(Protocol):
    """The part of one bucket's gradients that was not sent so far, as checkpoints keep it.

    Attributes:
        residuals: None if nothing was held back yet.
        scale: the loss scale in them.
    """

    residuals: Residuals | None
    scale: float

    def make(self) -> Residuals:
        """The residuals; zeros if there were none."""

    def begin_units(self, scale: float) -> None:
        """Note that the residuals, which were loaded, carry this loss scale."""


class GradientExchange:
    """Exchanges what backward leaves on each rank of one engine.

    All methods but ``reduce`` are those of an exchange that sends the mean of each step and keeps nothing.

    Attributes:
        of_bucket: what buckets have not sent so far; {} if everything is sent at once.
        steps: optimizer steps so far, if the exchange counts them.
        sums_late: a reduction may lack the gradients of late ranks; a later reduction then has them.
        remembers: the exchange keeps state from step to step; the state belongs to one model and its checkpoints.
    """

    sums_late = False
    remembers = False

    def __init__(self) -> None:
        self.of_bucket: Mapping[Bucket, BucketResiduals] = {}
        self.steps = 0

    # ---- set-up ------------------------------------------------------------------------------------------------

    def bind(self, buckets: Sequence[Bucket]) -> None:
        """Take the engine's buckets; called once, by its constructor."""

    def connect(self, optimizer: Optimizer, fragments: OptimizerFragments) -> None:
        """Serve ``optimizer``, whose steps begin next.

        Raises:
            TypeError: it needs another exchange.
        """

    # ---- reductions --------------------------------------------------------------------------------------------

    @property
    def reduces_at_step(self) -> bool:
        """True if gradients that are not sharded wait for the step in this backward; the same on all ranks."""
        return False

    @property
    def reduces_each_backward(self) -> bool:
        """True if each backward has one reduction of all of its gradients, at every stage, also inside of ``no_sync``.

        What comes after it is refused: ``refuse_second_reduction``.
        """
        return False

    def begin_flush(self, buckets: Sequence[Bucket]) -> None:
        """Prepare what ``buckets`` have accumulated locally (``grads.local``), which is reduced next. Collective."""

    def sums_replicas_apart(self, bucket: Bucket) -> bool:
        """True if ``reduce`` may leave the sum over replicas of ``bucket`` to ``ShardGroup.sum_replicas``."""
        return False

    def reduce(
        self, bucket: Bucket, out: Tensor, send: SendBuffer, add: bool, replicas: Replicas = Replicas.SENT
    ) -> Work:
        """Start reducing the gradients of ``bucket``, which are in ``send``, into ``out`` (1D), or add them there.

        ``replicas``: what is summed over them; other than ``SENT`` if it ``sums_replicas_apart``.
        """
        raise NotImplementedError

    # ---- a step ------------------------------------------------------------------------------------------------

    def set_loss_scale(self, scale: float) -> None:
        """Expect gradients that carry this loss scale."""

    def note_used(self, used: Mapping[Bucket, Sequence[int]]) -> None:
        """Take note of the parameters, by index, that have a gradient on any rank; the others are not stepped."""

    def end_step(self) -> None:
        """Note that a step was taken, and published. Collective."""

    def undo_step(self, counted: bool) -> None:
        """Note that the last step was skipped, and make everything as it was before its first reduction.

        ``counted``: ``end_step`` was called for it.
        """

    # ---- questions: Note [Questions to an exchange] ------------------------------------------------------------

    @property
    def ranks_step_apart(self) -> bool:
        """True if each rank steps with its own gradients."""
        return False

    @property
    def clips_before_exchange(self) -> bool:
        """True if the running step clips gradients before the exchange; ``clipped_norm`` then gives the norm."""
        return False

    def expect_clipping(self, max_norm: float) -> None:
        """Note that this step clips gradients to a 2-norm of ``max_norm``, before anything reads them."""

    def clipped_norm(self, max_norm: float) -> Tensor:
        """The norm (0D, fp32) before clipping of gradients that were clipped to ``max_norm`` and exchanged.

        Raises:
            RuntimeError: they were not clipped, or not to this norm.
        """
        raise RuntimeError(f"Gradients are not clipped to {max_norm:g} before they are exchanged.")

    def check_clipping(self, norm_type: float | None) -> None:
        """Raise RuntimeError if gradients cannot be clipped by this norm; None: by value."""

    def check_mean(self) -> None:
        """Raise RuntimeError if the accumulators do not get the mean of this step's gradients."""

    def refuse_second_reduction(self, names: str) -> NoReturn:
        """Raise RuntimeError: gradients came after their reduction, which an exchange cannot reduce by themselves.

        Asked where ranks that ``sums_late`` do not agree on them, or where it ``reduces_each_backward``.

        ``names``: of the buckets.
        """
        raise NotImplementedError

    def check_common_weights(self, what: str) -> None:
        """Raise ValueError if weights may differ between ranks after a step, as ``what`` needs the same on all."""

    # ---- states ------------------------------------------------------------------------------------------------

    def resume(self, steps: int) -> None:
        """Begin without residuals after ``steps`` optimizer steps."""

    def missing_share(self) -> float:
        """The share of gradients that sums have lacked since the last call; 0 unless ``sums_late``."""
        return 0.0

    def late_gradients(self) -> Iterator[tuple[Bucket, Tensor, Tensor]]:
        """Yield late gradients that are in no sum yet, bucket by bucket; nothing unless ``sums_late``. Collective.

        Each item is a bucket, the sum over all ranks (1D fp32, all elements), and the number of ranks in each element.
        """
        return iter(())

    def replace_late_gradients(self, read: Callable[[Bucket], tuple[Tensor, Tensor]]) -> None:
        """Replace late gradients that are in no sum yet by those that ``read`` returns, if ``sums_late``. Collective.

        ``read``: returns sum and counts of a bucket as ``late_gradients`` yields them; called where they are needed.
        """

    def forget_states(self) -> None:
        """Forget copies of the optimizer's states, which are replaced."""

    @property
    def nbytes(self) -> int:
        """Bytes of memory that it takes now."""
        return 0


class PlainExchange(GradientExchange):
    """Sends the gradients of each step in full.

    ``peers``: the ranks with the same model.
    """

    def __init__(self, peers: ShardGroup) -> None:
        super().__init__()
        self._peers = peers

    def connect(self, optimizer: Optimizer, fragments: OptimizerFragments) -> None:
        if isinstance(optimizer, ExchangingOptimizer) and self._peers.world.size > 1:
            name = type(optimizer).__name__
            raise TypeError(
                f"{name} exchanges momenta, for which the ranks have to be prepared. Name it in the configuration "
                f"(optimizer.type: {name}) instead of building it, {optimizer.prepared_at}."
            )

    def sums_replicas_apart(self, bucket: Bucket) -> bool:
        return bucket.sums_apart

    def reduce(
        self, bucket: Bucket, out: Tensor, send: SendBuffer, add: bool, replicas: Replicas = Replicas.SENT
    ) -> Work:
        if bucket.storage.is_cut:
            return bucket.group.reduce_scatter(out, send, add, bucket.name, replicas)
        return bucket.group.all_reduce(out, send, add, bucket.name)
