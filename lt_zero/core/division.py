"""The division of a run over its ranks, and the run that this process has joined last.

A ``Division`` is plain: each rank has the whole model, and sees data of its own. A feature that gives ranks parts of
these brings another one (``Feature.divide``).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, TypeVar

from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from lt_zero.common.transformers_models import warn_of_caches
from lt_zero.core.place_in_run import PlaceInRun
from lt_zero.core.rounds import Rounds

if TYPE_CHECKING:  # the core asks it nothing
    from lt_zero.common.boxes import ParamSpec
    from lt_zero.common.compat import DeviceMesh
    from lt_zero.core.comm.shard_group import ShardGroup
    from lt_zero.core.comm.world import World
    from lt_zero.core.engine.engine import Engine

T = TypeVar("T")
Inputs = tuple[tuple[Any, ...], Mapping[str, Any]]


class BatchCut(NamedTuple):
    """Ranks get parts of the rows of a batch.

    Attributes:
        key: of the configuration, by which they do.
        ranks: that share a row.
        hook: name of the method by which a module cuts its batch.
    """

    key: str
    ranks: int
    hook: str

    def __str__(self) -> str:
        return f"{self.key}={self.ranks}"


class RowRanks(Protocol):
    """The ranks that have parts of the same rows.

    Attributes:
        group: exchanges parts of rows between them.
        parts: from so many parts of a row a rank gathers what its own is compared with; 1: it gets whole rows.
        method: by which they do.
    """

    @property
    def group(self) -> Any: ...

    @property
    def parts(self) -> int: ...

    @property
    def method(self) -> str: ...


class PlannedParts(NamedTuple):
    """The part of a module that a rank has, where it has not all of it.

    Attributes:
        tensors: the parts of tensors that it has.
        stacks: the parts of stacks that it has, tensors with one entry for each of several modules.
        shared: parameters that other modules have, too, and how many have them.
        layers: of the module, if other ranks have those before and after; 0: there are no others.
    """

    tensors: Sequence[ParamSpec] = ()
    stacks: Sequence[ParamSpec] = ()
    shared: Mapping[Parameter, int] = MappingProxyType({})
    layers: int = 0


class PlannedDivision:
    """A run that is planned, without processes: each rank has the whole model."""

    def building(self, number: int) -> AbstractContextManager[None]:
        """Context in which a user builds module ``number`` of those that ranks have parts of a model in."""
        return nullcontext()

    def parts(self, module: nn.Module) -> PlannedParts:
        """The part of ``module`` that the first of its ranks has.

        Raises:
            ConfigError: it cannot be divided.
        """
        return PlannedParts()


class Division:
    """A run in which each rank has the whole model, and sees data of its own.

    Args:
        group: all ranks; None: the run has not begun.
        config: of the run.

    Attributes:
        known: ``group``.
        batch_cut: how batches are cut; None: a rank sees the whole of its batches.
        rounds: which micro-batches the ranks run at the same time; plain before they are known.
    """

    batch_cut: BatchCut | None = None

    def __init__(self, group: ShardGroup | None = None, config: Any = None) -> None:
        self.known = group
        self.config = config
        self.rounds = Rounds()

    # ---- ranks -------------------------------------------------------------------------------------------------

    @property
    def group(self) -> ShardGroup:
        """All ranks. Raises RuntimeError before the run begins."""
        if self.known is None:
            raise RuntimeError("The run has not begun: its process group is not known yet.")
        return self.known

    @property
    def world(self) -> World:
        """All ranks. Raises RuntimeError before the run begins."""
        return self.group.world

    @property
    def peers(self) -> ShardGroup:
        """The ranks that have the same module."""
        return self.group

    @property
    def firsts(self) -> range:
        """The first rank of each data rank, which is a rank that sees other data, or several with parts of a model."""
        return range(self.world.size)

    @property
    def data_ranks(self) -> int:
        """The number of data ranks."""
        return len(self.firsts)

    @property
    def data_rank(self) -> int:
        """The index of the data rank that this rank belongs to."""
        return self.world.rank

    @property
    def part_rank(self) -> int:
        """The number of the part of the model's tensors that this rank has."""
        return 0

    @property
    def device_mesh(self) -> DeviceMesh | None:
        """The ranks along the axes of parallelism, with Lightning's names; None: all are data ranks."""
        return None

    @property
    def data_group(self) -> Any:
        """The process group of the ranks that see different data and have the same parts; None: all ranks."""
        return None

    @property
    def token_group(self) -> Any:
        """The process group of the ranks that see other data, or another part of a row; None: all ranks."""
        return None

    def group_of_reduction(self, reduce_op: Any) -> Any:
        """The process group of a reduction for which a script has given none; None: all ranks.

        Raises:
            ValueError: it is unknown what the values are of.
        """
        return None

    def place(self, number: int) -> PlaceInRun:
        """The place of engine ``number`` in the run."""
        return PlaceInRun(number)

    # ---- the run of this process -------------------------------------------------------------------------------

    def begin(self, new: bool) -> None:
        """Make this the run that this process has joined last; also if it was ended. Collective.

        ``new``: it was just divided.
        """
        _current[:] = [weakref.ref(self)]

    def end(self) -> None:
        """End that on this rank, unless another run was joined since."""
        if current() is self:
            _current.clear()

    def find(self, kind: type[T]) -> T | None:
        """Return what parts of a model ask the run for, by its class; None: the run has none."""
        return None

    @property
    def row_ranks(self) -> RowRanks | None:
        """The ranks that have parts of the rows which this rank sees now; None: it sees whole rows."""
        return None

    # ---- building modules --------------------------------------------------------------------------------------

    def building(self, module: nn.Module, compare: Callable[[], object]) -> AbstractContextManager[None]:
        """Context in which a user builds ``module``, and may distribute its parameters.

        ``compare``: compares the module between ranks; is called before the first collective that depends on it.
        """
        return nullcontext()

    def compare(self, module: nn.Module) -> None:
        """Compare what ranks say of parts of the model that they do not have. Collective.

        Raises:
            RuntimeError: on all ranks, if they differ; names the first difference, and the ranks.
        """

    def adopt(self, module: nn.Module) -> None:
        """Prepare the forwards of a module, also of one that was trained in an earlier run.

        Raises:
            ConfigError: it cannot be run on parts of what the ranks see.
        """

    def arguments(self, module: nn.Module, config: Any) -> dict[str, Any]:
        """Divide a module; returns arguments of ``lt_zero.shard``: ``group`` and others. Collective.

        ``config``: by which it is sharded, where that of the run is resolved.

        Raises:
            ConfigError: it cannot be divided.
        """
        return {"group": self.group}

    def connect(self, engine: Engine, config: Any, begin: Callable[[], float], weight: Callable[[], float]) -> None:
        """Prepare the passes of an engine. Its weights come later.

        Args:
            engine: of a module that was divided.
            config: as for ``arguments``.
            begin: is called before passes that begin by themselves; returns the loss scale.
            weight: what losses are multiplied with before their backward.
        """

    def share_buffers(self, module: nn.Module) -> None:
        """Share the buffers that ranks have beside parts of the model. Collective.

        Raises:
            RuntimeError: on all of these ranks, if they have others.
        """

    def follow_optimizers(self, optimizers: Iterable[Optimizer]) -> None:
        """Let optimizers have the parameters that replaced theirs when the module was divided."""

    def warn_of_caches(self, module: nn.Module) -> None:
        """Let models of transformers warn at their first forward of training if a cache mixes up sequences in a row."""
        warn_of_caches(module)

    # ---- batches and passes ------------------------------------------------------------------------------------

    @property
    def cuts_inputs(self) -> bool:
        """True if the inputs of a model have to be cut: batches are, and the user has not done it."""
        return False

    def compare_batch(self, batch: Any) -> None:
        """Compare the first batch of training between ranks that see the same data. Collective for that batch.

        Raises:
            RuntimeError: on all ranks, if they have different batches.
        """

    def cut_batch(self, batch: Any, module: nn.Module | None, kind: str = "train") -> Any:
        """This rank's part of a batch. Collective for the first of a ``kind``.

        ``module``: may have the hook ``batch_cut.hook``.

        Raises:
            RuntimeError: on all ranks, if those of a row have different batches.
            ConfigError: it is unknown how to cut it.
        """
        return batch

    def cut_inputs(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], trains: bool) -> Inputs:
        """This rank's part of the inputs of ``module``, if ``cuts_inputs``. Collective for the first ones.

        ``trains``: a backward may follow.

        Raises:
            RuntimeError, ConfigError: as ``cut_batch``.
        """
        return args, kwargs

    def forward(self, module: nn.Module, trains: bool) -> AbstractContextManager[None]:
        """Context of a forward of ``module``; ``trains``: a backward may follow."""
        return nullcontext()

    def leave_to_user(self, whole_in_eval: bool) -> None:
        """Leave it to the user to cut batches, and to average the losses of parts of rows.

        ``whole_in_eval``: in evaluation mode each rank sees whole rows of its own.
        """

    def compare_loss(self, loss: Tensor) -> None:
        """Warn once if ranks have losses of parts of a row that cannot be averaged. Collective."""


# Of the run that this process has joined last, which owns it.
_current: list[weakref.ref[Division]] = []


def current() -> Division | None:
    """The run that this process has joined last; None: it is over, or there was none."""
    return _current[0]() if _current else None


def current_row_ranks() -> RowRanks | None:
    """``Division.row_ranks`` of the current run; None: rows are whole, or there is no run."""
    run = current()
    return run.row_ranks if run is not None else None


class PartOfRun(nn.Module):
    """A module that asks for the configuration of the run which trains it.

    Attributes:
        layers_on_ranks: how many layers ranks have one after the other; 0: each has the whole module.
        loop_engine: where the class is by which ``lt_zero.initialize`` trains it, ``module:class``; "": as any model.
    """

    loop_engine: ClassVar[str] = ""
    layers_on_ranks = 0

    def follow(self, config: Any) -> None:
        """Follow the configuration of a run, which may not have been known when the module was made.

        Raises:
            ConfigError: it contradicts how the module was made.
        """

    def adapted(self, config: Any) -> Any:
        """Return the configuration for a run that trains this module alone.

        Raises:
            ConfigError: it contradicts how the module was made.
        """
        return config


def follow_run(module: nn.Module, config: Any) -> None:
    """Let the parts of a module that ask for it follow the configuration of a run. Errors: ``PartOfRun.follow``."""
    for child in module.modules():
        if isinstance(child, PartOfRun):
            child.follow(config)
