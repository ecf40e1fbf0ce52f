"""Reasons why a resume will not repeat a loader, as far as the loader shows them when a run begins."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

from torch.utils.data import DataLoader

from lt_zero.lightning.data_position.attributes import asked, is_a, items_of
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
    if any(_shuffles(part) for part in own.parts.values()):
        yield (
            "is of webdataset, which shuffles samples and shards with generators that it seeds by the clock, or keeps "
            "the epoch where it cannot be found: a resumed run may see other samples, in another order. Without its "
            "shuffles and its samples of shards the order is repeated"
        )
    if stateful and _has_buffer(getattr(getattr(loader, "dataset", None), "_ex_iterable", None)):
        workers_too = "; with workers loading it may end in an IndexError of datasets" if _workers(loader) else ""
        yield (
            "resumes by its own state, in which Hugging Face leaves out the samples that are in the shuffle buffer: a "
            f"run that resumes inside of an epoch will not see these{workers_too}. In a plain DataLoader the order is "
            "repeated"
        )
    if stateful and _asks_for_more(getattr(loader, "dataset", None)):
        yield (
            "cannot tell its state: `state_dict` of its data set needs arguments that only litdata's loader gives. Use "
            "litdata's StreamingDataLoader, or a plain DataLoader"
        )
    if stateful and Openings(loader, own).unwatched:
        yield (
            "resumes by itself and opens a sampler of a class that allows no subclass: a run that resumes inside of an "
            "epoch may see another order. Give the sampler `state_dict` and `load_state_dict`"
        )
    if own.hidden and not stateful:
        yield (
            f"keeps its place in {', '.join(own.hidden)} (an iterator, a file that it reads, a shared array, or a "
            "generator of an unknown kind), which cannot be saved: a resumed run will see other samples. Make it in "
            "`__iter__`, or give the loader `state_dict` and `load_state_dict`"
        )
    workers = _workers(loader) > 0
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


def _workers(loader: object) -> int:
    return loader.num_workers if isinstance(loader, DataLoader) else 0


def _has_buffer(stream: object) -> bool:
    """True if a stream of samples of Hugging Face's ``datasets`` is shuffled in a buffer."""
    if stream is None or hasattr(stream, "buffer_size"):
        return stream is not None
    inner = [getattr(stream, "ex_iterable", None), *(getattr(stream, "ex_iterables", None) or [])]
    return any(_has_buffer(one) for one in inner)


def _asks_for_more(dataset: object) -> bool:
    """True if a data set's ``state_dict`` cannot be called without arguments, as torchdata's loaders do."""
    method = getattr(dataset, "state_dict", None)
    if not callable(method) or type(dataset).__module__.split(".")[0] != "litdata":
        return False
    empty = inspect.Parameter.empty
    return any(parameter.default is empty for parameter in inspect.signature(method).parameters.values())


# Stages of webdataset's pipelines that keep the order of what they read, and the function that shuffles in a buffer.
_IN_ORDER = {
    "WebDataset",
    "WebLoader",
    "DataPipeline",
    "SimpleShardList",
    "StreamingOpen",
    "FileCache",
    "FilterFunction",
}
_IN_A_BUFFER = "_shuffle"


def _shuffles(part: object) -> bool:
    """True if a data set of webdataset may give samples in an order that differs from pass to pass."""
    pipeline = asked(part, "pipeline")
    stages = [part, *(items_of(pipeline) if is_a(pipeline, (list, tuple)) else ())]
    return any(_is_shuffled(stage) for stage in stages if type(stage).__module__.split(".")[0] == "webdataset")


def _is_shuffled(stage: object) -> bool:
    name = type(stage).__name__
    if name not in _IN_ORDER:
        return True
    if name == "SimpleShardList":
        return getattr(stage, "seed", None) is not None
    code = getattr(stage, "f", None)
    if getattr(code, "__module__", "").split(".")[0] != "webdataset" or getattr(code, "__name__", "") != _IN_A_BUFFER:
        return False
    given = getattr(stage, "args", ())
    size = getattr(stage, "kw", {}).get("bufsize", given[0] if given else None)
    return size is None or size > 1  # a buffer of one sample keeps the order
