"""Reasons why a resume will not repeat a loader, as far as the loader shows them when a run begins."""

from __future__ import annotations

from collections.abc import Iterator

from torch.utils.data import DataLoader

from lt_zero.lightning.data_position.openings import Openings
from lt_zero.lightning.data_position.own_state import OwnState


def inexact(loader: object, own: OwnState, stateful: bool) -> Iterator[str]:
    """Find what a run that resumes in this training loader will not repeat; nothing for most loaders.

    Args:
        loader: the user's.
        own: what was found in its attributes.
        stateful: whether it resumes by itself.
    """
    if hasattr(type(loader), "__next__"):
        yield "can be read once only (it is an iterator): a resumed run cannot read it again up to the checkpoint"
    packages = {type(part).__module__.split(".")[0] for part in own.parts.values()}
    if "webdataset" in packages:
        yield (
            "is of webdataset, which shuffles samples and shards with generators that it seeds by the clock, or keeps "
            "the epoch where it cannot be found: a resumed run may see other samples, in another order. Without its "
            "shuffles the order is repeated"
        )
    if stateful and _has_buffer(getattr(getattr(loader, "dataset", None), "_ex_iterable", None)):
        yield (
            "resumes by its own state, in which Hugging Face leaves out the samples that are in the shuffle buffer: a "
            "run that resumes inside of an epoch will not see these. In a plain DataLoader the order is repeated"
        )
    if stateful and Openings(loader, own).unwatched:
        yield (
            "resumes by itself and opens a sampler of a class that allows no subclass: a run that resumes inside of an "
            "epoch may see another order. Give the sampler `state_dict` and `load_state_dict`"
        )
    if own.hidden and not stateful:
        yield (
            f"keeps its place in {', '.join(own.hidden)} (an iterator), which cannot be saved: a resumed run will see "
            "other samples. Make it in `__iter__`, or give the loader `state_dict` and `load_state_dict`"
        )
    workers = isinstance(loader, DataLoader) and loader.num_workers > 0
    if workers and getattr(loader, "persistent_workers", False):
        yield (
            "keeps its workers (persistent_workers=True): after a resume from any epoch but the first, random numbers "
            "that samples draw in them start over. The order of the samples is repeated"
        )
    elif workers and stateful:
        yield (
            "resumes by its own state, which has no random states of its workers: random numbers that samples draw in "
            "them start over at a resume inside of an epoch. The order of the samples is repeated"
        )


def _has_buffer(stream: object) -> bool:
    """True if a stream of samples of Hugging Face's ``datasets`` is shuffled in a buffer."""
    if stream is None or hasattr(stream, "buffer_size"):
        return stream is not None
    inner = [getattr(stream, "ex_iterable", None), *(getattr(stream, "ex_iterables", None) or [])]
    return any(_has_buffer(one) for one in inner)
