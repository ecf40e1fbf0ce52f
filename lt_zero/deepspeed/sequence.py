"""Sequences that are cut over ranks by DeepSpeed's adapters (ALST): how many ranks, and the attention of models.

Note [Sequences that a script cuts]
    In such a script each rank has a loader of its own, with other samples. The adapter of a loader (adapter.py)
    exchanges batches: the ranks of a sequence get their parts of the first one's batch, then of the second one's. The
    loss of a model is that of a part, and the script takes the mean over the tokens of all parts: it gathers their
    losses with the numbers of their labels. So models keep their loss function here, while their attention is switched
    as in any other run. Accelerate and transformers' Trainer are such scripts.
"""

from __future__ import annotations

from typing import Any

from lt_zero.common.arguments import expect_number
from lt_zero.core.comm.process_groups import rank_and_size
from lt_zero.core.division import current_row_ranks


class _NoGroupYet:
    """Stands for the process group of a sequence before ``initialize`` has made it."""

    def __repr__(self) -> str:
        return "<the ranks of a sequence, of which deepspeed.initialize makes a process group>"


class SequenceState:
    """The ``mpu`` of a script whose sequences are cut: it tells ``initialize`` over how many ranks.

    Args:
        size: the ranks of a sequence.
        whole_in_eval: in evaluation mode each rank computes whole sequences.
    """

    def __init__(self, size: int, whole_in_eval: bool) -> None:
        self.size, self.whole_in_eval = size, whole_in_eval

    def get_sequence_parallel_world_size(self) -> int:
        """The ranks of a sequence."""
        return self.size

    def get_sequence_parallel_rank(self) -> int:
        """Index of this rank's part of sequences; without tensor parallelism neighbours share a sequence."""
        ranks = current_row_ranks()
        return int(ranks.group.rank) if ranks is not None else rank_and_size()[0] % self.size

    def get_sequence_parallel_group(self) -> Any:
        """The ranks with the other parts of this rank's sequences; before ``initialize`` nothing that torch takes."""
        ranks = current_row_ranks()
        return ranks.group.process_group if ranks is not None else _NoGroupYet()


class UlyssesSPAttentionHF:
    """Tells ``initialize`` over how many ranks the sequences of a model of transformers are cut."""

    @classmethod
    def register_with_transformers(
        cls,
        model_name_or_path: Any,
        core_attn_implementation: str,
        sequence_parallel_size: int,
        micro_batch_size: int | None = None,
        seq_length: int | None = None,
        seq_length_is_variable: bool = True,
        disable_in_eval: bool = False,
        max_length: int | None = None,
    ) -> SequenceState | None:
        """The ``mpu`` for ``initialize``, which switches the attention of the model; None for one rank.

        Lengths and the micro-batch have no effect: both may change from batch to batch.

        Args:
            model_name_or_path: a model, or what it is made of.
            core_attn_implementation: "sdpa", or another name of an attention that the model is then to have.
            sequence_parallel_size: the ranks of a sequence.
            disable_in_eval: in evaluation mode each rank computes whole sequences.

        Raises:
            ValueError: the model has another attention than is named, or ranks do not divide those of the run.
        """
        expect_number(sequence_parallel_size, "register_with_transformers(sequence_parallel_size=...)", whole=True)
        if sequence_parallel_size == 1:
            return None
        has = getattr(getattr(model_name_or_path, "config", None), "_attn_implementation", None)
        if has is not None and has != core_attn_implementation:
            raise ValueError(
                f"register_with_transformers(core_attn_implementation={core_attn_implementation!r}), but the model has "
                f"attn_implementation={has!r}. Make them the same."
            )
        return SequenceState(sequence_parallel_size, disable_in_eval)

    @classmethod
    def unregister_from_transformers(cls, core_attn_implementation: str | None = None) -> None:
        """Do nothing: attention that was switched computes whole sequences after the run."""
