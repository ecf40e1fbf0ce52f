"""The cost of a schedule: the share of a step in which ranks wait, and the forwards that wait for their backward."""

from __future__ import annotations

from typing import Literal

Schedule = Literal["1F1B", "GPipe", "Interleaved1F1B", "LoopedBFS"]


def running(schedule: Schedule, ranks: int, count: int, trains: bool = True) -> Schedule:
    """The schedule that runs ``count`` micro-batches: another one where ``schedule`` cannot."""
    if schedule == "1F1B":
        return "1F1B" if trains and count >= ranks else "GPipe"
    if schedule == "Interleaved1F1B":
        return "Interleaved1F1B" if trains and count % max(1, count // ranks) == 0 else "LoopedBFS"
    return schedule


def bubble(ranks: int, count: int, chunks: int = 1) -> float:
    """The share of a step in which a rank has nothing to compute, if all stages take equally long.

    Args:
        ranks: of the pipeline.
        count: micro-batches.
        chunks: stages on each rank.
    """
    return (ranks - 1) / (chunks * count + ranks - 1)


def in_flight(schedule: Schedule, ranks: int, count: int, chunks: int, rank: int) -> int:
    """Forwards of a rank's stages that wait for their backward, at most: each keeps the activations of one stage.

    Args:
        schedule, ranks, count, chunks: as above.
        rank: of the pipeline.
    """
    every, after, runs = chunks * count, ranks - 1 - rank, running(schedule, ranks, count)
    if runs == "1F1B":
        return min(every, after + 1)
    if runs == "Interleaved1F1B":
        each_round = count // max(1, count // ranks)
        return min(every, (chunks - 1) * each_round + 2 * after + 1)
    return every
