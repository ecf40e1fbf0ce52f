"""Background steps of buckets: what the optimizer's step asks about them. By default there are none.

There are two kinds. An early step updates a bucket while backward still runs for other buckets, as soon as its
gradients are reduced. That is right only if the gradients are not clipped, unscaled or read before the optimizer's
step. Such buckets are in ``early``, and the model is partially stepped until the optimizer's step
(``Offload.partially_stepped``). A late step updates a bucket beside the next forward, which waits for it. Such buckets
are in ``late``.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from contextlib import AbstractContextManager, nullcontext

from lt_zero.core.engine.bucket import Bucket
from lt_zero.core.engine.offload import Offload
from lt_zero.core.step.fused_step import FusedStep, Part
from lt_zero.core.step.param_groups import ShardedParamGroups, StepPlan
from lt_zero.core.step.reduced_grads import ReducedGrads


class BackgroundSteps:
    """The background steps of one optimizer: none, so all of its buckets are stepped by its step.

    Attributes:
        early: buckets of the running step that were stepped beside backward.
        late: buckets of the running step that the background thread publishes.
    """

    early: Set[Bucket] = frozenset()
    late: Set[Bucket] = frozenset()

    def beside_backward(self) -> AbstractContextManager[None]:
        """Context for a backward that this optimizer's step follows, with gradients unread in between.

        No effect where nothing can be stepped early.
        """
        return nullcontext()

    # ---- called only where ``Offload.overlaps`` --------------------------------------------------------------------

    def take_early(self, used: Mapping[Bucket, list[int]]) -> Set[Bucket]:
        """The buckets that were stepped beside backward. Collective.

        Raises:
            SwapError: on all ranks, if gradients or hyper-parameters have changed since on one.
        """
        return self.early

    def plan_late(self, plan: StepPlan, early: Set[Bucket]) -> dict[Bucket, list[Part] | None]:
        """The buckets that the background thread steps and publishes, in the same order on all ranks.

        None instead of a plan: the thread only publishes, because the bucket is in ``early``, or because this rank has
        to move states first.
        """
        return {}

    def hand_over(self, bucket: Bucket, parts: list[Part] | None) -> None:
        """Have the background thread step (with ``parts``) and publish a bucket of ``plan_late``."""

    def end_step(self) -> None:
        """Forget the buckets of the step."""

    def forget_states(self) -> None:
        """Make the next step no background step, as it moves states, which were loaded, to the bucket stores."""


class OverlappingOffload(Offload):
    """An offload that steps buckets beside backward or forward."""

    def background_steps(
        self, fragments: ShardedParamGroups, fused: FusedStep | None, grads: ReducedGrads
    ) -> BackgroundSteps:
        """Make the background steps of an optimizer.

        Args:
            fragments: of the optimizer.
            fused: its kernel; None: it has none.
            grads: its reduced gradients.
        """
        return BackgroundSteps()
