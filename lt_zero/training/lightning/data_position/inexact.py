"""Reasons why a resume will not repeat a loader, as far as the loader shows them when a run begins."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from lt_zero.training.lightning.data_position.attributes import asked, is_a, items_of
from lt_zero.training.lightning.data_position.own_state import OwnState, reader_of


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
            "is of webdataset, and shuffles samples or draws shards by the clock: a resumed run will see other "
            "samples, in another order. Give its shuffles a seed (`shuffle(1000, seed=1)`), and draw shards with "
            "`ResampledShards(urls, deterministic=True)`"
        )
    if stateful and _has_buffer(getattr(getattr(loader, "dataset", None), "_ex_iterable", None)):
        reader = reader_of(loader)
        loads = reader is not None and reader.num_workers > 0
        workers_too = "; with workers loading it may end in an IndexError of datasets" if loads else ""
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
    if stateful and getattr(getattr(loader, "dataset", None), "_iterate_over_all", False) is True:
        yield (
            "resumes by its own state, from which litdata's CombinedStreamingDataset does not go on where it was with "
            "iterate_over_all=True: a run that resumes inside of an epoch will see samples twice or not at all. Give "
            "it weights and iterate_over_all=False"
        )
    if stateful and _opens_unwatched(loader, own):
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
    reader = reader_of(loader)
    if reader is None or reader.num_workers == 0:
        return
    if reader.persistent_workers and _counts_in_workers(reader):
        yield (
            "keeps its workers (persistent_workers=True), and its data set has no `state_dict`: after a resume from "
            "any epoch but the first, what it counts or draws in them starts over, and samples may come in another "
            "order"
        )
    elif reader.persistent_workers:
        yield (
            "keeps its workers (persistent_workers=True): after a resume from any epoch but the first, random numbers "
            "that samples draw in them start over. The order of the samples is repeated"
        )
    elif stateful:
        yield (
            "resumes by its own state, which has no random states of its workers: random numbers that samples draw in "
            "them start over at a resume inside of an epoch. The order of the samples is repeated"
        )


def _counts_in_workers(reader: DataLoader[Any]) -> bool:
    """True if the order of an iterable data set may follow from what it has counted in earlier epochs."""
    return isinstance(reader.dataset, IterableDataset) and not callable(asked(reader.dataset, "state_dict"))


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


# Stages of webdataset's pipelines whose order a resumed run repeats, with the seeds and counters that it restores, and
# the functions that shuffle in a buffer and that draw shards.
_REPEATED = {
    "WebDataset",
    "WebLoader",
    "DataPipeline",
    "SimpleShardList",
    "RandomMix",
    "RoundRobin",
    "StreamingOpen",
    "FileCache",
    "FilterFunction",
    "detshuffle",
}
_IN_A_BUFFER = "_shuffle"
_ARGUMENTS = ("bufsize", "initial", "rng", "seed")
_OF_SHARDS = "resampled_"


def _opens_unwatched(loader: object, own: OwnState) -> bool:
    """True if nothing tells when a loader opens its sampler."""
    from lt_zero.training.lightning.data_position.openings import Openings

    return Openings(loader, own).unwatched


def _shuffles(part: object) -> bool:
    """True if a data set of webdataset may give samples in an order that differs from run to run."""
    pipeline = asked(part, "pipeline")
    stages = [part, *(items_of(pipeline) if is_a(pipeline, (list, tuple)) else ())]
    return any(_is_shuffled(stage) for stage in stages if type(stage).__module__.split(".")[0] == "webdataset")


def _is_shuffled(stage: object) -> bool:
    name = type(stage).__name__.removesuffix("_Length")  # of a data set that was told its length
    if name == "ResampledShards":
        return not getattr(stage, "deterministic", False)
    if name not in _REPEATED:
        return True
    code = getattr(stage, "f", None)
    if getattr(code, "__module__", "").split(".")[0] != "webdataset":
        return False
    if getattr(code, "__name__", "") == _OF_SHARDS:
        return True
    if getattr(code, "__name__", "") != _IN_A_BUFFER:
        return False
    given = {**dict(zip(_ARGUMENTS, getattr(stage, "args", ()), strict=False)), **getattr(stage, "kw", {})}
    in_order = given.get("bufsize", 2) <= 1  # a buffer of one sample keeps the order
    return not in_order and given.get("rng") is None and given.get("seed") is None
