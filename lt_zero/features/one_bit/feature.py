"""``optimizer.type`` OneBitAdam, OneBitLamb and ZeroOneAdam: the exchange that they need."""

from __future__ import annotations

from dataclasses import replace

from typing_extensions import override

from lt_zero.core.engine.options import EngineOptions
from lt_zero.core.engine.partition import EnginePlan, GroupFacts
from lt_zero.core.feature import Feature
from lt_zero.exchange.compression import plan_compression
from lt_zero.exchange.error_feedback import FeedbackPlan, none_sent_dense
from lt_zero.features.one_bit.compressed_momentum import AveragedMomenta
from lt_zero.features.one_bit.local_steps import AveragedSteps
from lt_zero.kernels.codecs import BlockCodec

MOMENTA = BlockCodec(1, 1024)  # 96.8 % fewer bytes than fp32
_LONGEST = 16  # steps between two exchanges at last; default of ZeroOneAdam's local_step_clipper


class OneBit(Feature):
    """Momenta, or changes of weights, are averaged in one bit."""

    needs_one_model = "optimizer.type"

    @override
    def options(self, options: EngineOptions, training: bool) -> EngineOptions:
        return replace(options, sent_dense=none_sent_dense)

    @override
    def exchange(self, plan: EnginePlan, skips_steps: bool, group: GroupFacts) -> FeedbackPlan | None:
        if plan_compression(group.nodes, MOMENTA, False) is None:
            return None  # there is one rank
        if self.config.one_bit != "zerooneadam":
            return AveragedMomenta(MOMENTA, False, skips_steps)
        longest = int(self.config.optimizer.params.get("local_step_clipper", _LONGEST))
        return AveragedSteps(MOMENTA, False, skips_steps, longest)
