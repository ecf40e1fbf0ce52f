"""The door: what a feature can do in a run. How the features are asked: ask.py.

The core and the faces name no feature. They ask the features of a run at a few points, in the order of their table
(``lt_zero.features``), which is the same on all ranks: process groups are made in one order everywhere. A feature that
is off is not imported.

A package of one's own adds a feature on all ranks, before the configuration is read:

    class NoiseBlock(Block):
        scale: Real = key(0.0, "its standard deviation", ge=0)

    class Noise(Feature):
        def watch(self, engine, run): ...  # self.config.noise is a NoiseBlock

    register(Entry("noise", "my_package.noise:Noise", "noise", lambda config: config.noise.scale > 0, NoiseBlock))

docs/internals/features.md describes each hook, with examples that run (tests/outside).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from lt_zero.common.errors import Problem as Problem
from lt_zero.common.fields import Block as Block
from lt_zero.common.fields import IdleKeys as IdleKeys
from lt_zero.common.fields import Positive as Positive
from lt_zero.common.fields import Real as Real
from lt_zero.common.fields import Whole as Whole
from lt_zero.common.fields import key as key
from lt_zero.core.place_in_run import PlaceInRun as PlaceInRun

if TYPE_CHECKING:  # who reads a configuration needs no engine
    import torch
    from torch import nn

    from lt_zero.core.comm.shard_group import ShardGroup
    from lt_zero.core.comm.world import World
    from lt_zero.core.division import Division, PlannedDivision
    from lt_zero.core.engine.bucket import Bucket, GatherStrategy
    from lt_zero.core.engine.engine import Engine
    from lt_zero.core.engine.exchange_plan import ExchangePlan
    from lt_zero.core.engine.offload import Offload
    from lt_zero.core.engine.options import EngineOptions
    from lt_zero.core.engine.partition import BucketPlan, EnginePlan, GroupFacts
    from lt_zero.core.engine.storage_plan import Codecs, StoragePlan
    from lt_zero.core.rounds import Rounds


class Handle(Protocol):
    """Takes back what a feature has changed."""

    def remove(self) -> None: ...


class Undo:
    """Changes, which ``remove`` takes back, the last one first. Idempotent."""

    def __init__(self, stack: ExitStack | None = None) -> None:
        self._stack = stack or ExitStack()

    def also(self, take_back: Callable[[], object]) -> None:
        """Call this, too, before those that are there."""
        self._stack.callback(take_back)

    def remove(self) -> None:
        self._stack.close()


class Restorable(Protocol):
    """A state that checkpoints have; with the methods of torch, which modules, schedulers and metrics have, too."""

    def state_dict(self) -> Any:
        """The value to save: plain values and tensors, in containers. Not collective.

        Ranks may have different values. The same number of ranks gets its own back, any other one those of rank 0. A
        tensor of which each rank has a part is a ``Fragment`` (lazy_tensor.py) on each; with one in it, the other
        values are those of rank 0.
        """

    def load_state_dict(self, state: Any, /) -> object:
        """Go on with a saved value. Its tensors are on the CPU, those of fragments whole. Not collective."""


class Feature:
    """One feature of a run. All hooks are no-ops by default; a hook is collective if all ranks call it.

    Args:
        config: the configuration of the run, the same on all ranks.

    Attributes:
        needs_one_model: the key of a feature for which all ranks need the same parameters; "": they may differ.
        ends_with_fit: the Trainer ends what ``watch`` has begun with each fit, and calls it again for the next one.
        stays: a module keeps what ``prepare`` has changed when its engine is detached.
        summary: a line for the user about what it does to this model; ``watch`` sets it.
    """

    needs_one_model: ClassVar[str] = ""
    ends_with_fit: ClassVar[bool] = False
    stays: ClassVar[bool] = False
    summary = ""

    def __init__(self, config: Any) -> None:
        self.config = config

    # ---- plans: forecasts ask for them, too, without processes -----------------------------------------------------

    def options(self, options: EngineOptions, training: bool) -> EngineOptions:
        """Return the options of an engine, changed. ``training``: as for ``lt_zero.shard``."""
        return options

    def codecs(self, bucket: BucketPlan, group: GroupFacts, training: bool) -> Codecs | None:
        """Choose the codecs in which weights of a bucket rest and are gathered; None: leave it to other features.

        Args:
            bucket: the plan of it.
            group: the ranks over which it is sharded.
            training: trainable weights have master weights.
        """
        return None

    def exchange(self, plan: EnginePlan, skips_steps: bool, group: GroupFacts) -> ExchangePlan | None:
        """Plan the exchange of gradients; None: leave it to other features.

        Args:
            plan: of the buckets.
            skips_steps: steps may be skipped.
            group: the ranks with the same model.
        """
        return None

    def plan_division(self, ranks: int) -> PlannedDivision | None:
        """Plan how a run of so many ranks will be divided; None: leave it to other features. See ``divide``.

        Raises:
            ConfigError: the ranks cannot be divided so.
        """
        return None

    # ---- a run -----------------------------------------------------------------------------------------------------

    def divide(self, group: ShardGroup) -> Division | None:
        """Divide the model, or what is trained on, over all ranks; None: leave it to other features. Collective.

        Called by each face at the begin of a run, once its collectives are there.

        Raises:
            ConfigError: the ranks cannot be divided so.
        """
        return None

    def rounds(self, group: ShardGroup) -> Rounds | None:
        """Say which micro-batches the ranks run at the same time; None: leave it to other features. Collective.

        Called by each face at the begin of a run, after ``divide``.

        Args:
            group: all ranks.

        Raises:
            ConfigError: the ranks cannot run them.
        """
        return None

    def join(self, group: ShardGroup) -> None:
        """Connect the ranks of a group that was configured. Collective; called for each group, in one order.

        Raises:
            ConfigError: they cannot be connected so.
        """

    def prepare(self, module: nn.Module, group: ShardGroup, training: bool) -> Handle | None:
        """Change a module before its buckets are planned. Collective.

        Args:
            module: not sharded yet.
            group: the ranks that have it.
            training: as for ``lt_zero.shard``.

        Returns:
            What takes the change back, at an error or when the engine is detached.

        Raises:
            ConfigError: the feature does not fit the module, which is unchanged.
        """
        return None

    def check(self, plan: EnginePlan, options: EngineOptions, group: ShardGroup, training: bool) -> None:
        """Check a plan of buckets before the parameters are moved into them, and log what it leads to.

        Args:
            plan: of the module's buckets.
            options: of the engine.
            group: the ranks with the same model.
            training: as for ``lt_zero.shard``.

        Raises:
            ConfigError: the feature does not fit it.
        """

    def place(
        self, buckets: Sequence[Bucket], world: World, options: EngineOptions, device: torch.device
    ) -> Offload | None:
        """Say where the tensors of buckets are kept, before values are loaded; None: leave it to other features.

        Collective over ``world``; some ranks may have no buckets.

        Args:
            buckets: of this rank's model; their places change by ``Bucket.set_stores``.
            world: all ranks.
            options: of the engine.
            device: that computes.

        Returns:
            What the engine and its steps ask about these tensors.

        Raises:
            SwapError: on all ranks, a place cannot be used.
        """
        return None

    def gathers(self, row: StoragePlan, group: ShardGroup) -> GatherStrategy | None:
        """Make the strategy by which the weights of one bucket of ``group`` are gathered; None: leave it to others."""
        return None

    def watch(self, engine: Engine, run: PlaceInRun) -> Handle | None:
        """Follow an engine that is ready to train: its weights are loaded, and are the same on all ranks. Collective.

        It is called once for each engine, or for each fit with ``ends_with_fit``; optimizers may come later.

        Returns:
            What ends it, when the engine is detached. A ``Figure`` (followers.py) is shown by monitors.
        """
        return None

    def states(self) -> Mapping[str, Restorable]:
        """The states that checkpoints of the watched engine have, by names that no other feature uses.

        Asked at each save, and at each load that resumes: after weights, before optimizers. The same names on all
        ranks.
        """
        return {}


@dataclass(frozen=True)
class Entry:
    """A row of the table of features.

    Attributes:
        name: of the feature, in texts.
        place: where its class is, ``module:class``; imported if the feature is asked for.
        key: of the configuration, or variable of the environment, by which it is asked for; perhaps one in ``block``.
        asked: returns whether a configuration, or the environment, asks for it.
        block: of a key at the top level that the feature brings, with its rules; each of its keys has a default. The
            configuration has it as an attribute of the key's name. A text is its place, ``module:class``, of a module
            that is small: it is imported with the configuration. None: the key is one of lt_zero's.
        off: keys of the block, with the values by which the feature is off, whatever its other keys are. Where the
            folder of the feature is missing, such a block is read all the same. None: only null and false are off.
    """

    name: str
    place: str
    key: str
    asked: Callable[[Any], bool]
    block: type[Block] | str | None = None
    off: Mapping[str, Any] | None = None

    @property
    def block_key(self) -> str:
        """The key of the block."""
        return self.key.partition(".")[0]

    def is_asked(self, config: Any) -> bool:
        """True if it is asked for.

        It is off in a configuration without the block: one that was made before ``register``, or without its folder.
        """
        if self.block is None:
            return self.asked(config)
        kind = Block if isinstance(self.block, str) else self.block
        return isinstance(getattr(config, self.block_key, None), kind) and self.asked(config)


_registered: list[Entry] = []


def register(entry: Entry) -> None:
    """Add a feature after all others. The same on all ranks, in one order.

    Raises:
        ValueError: its name, or the key of its block, is taken.
    """
    if any(known.name == entry.name for known in _registered):
        raise ValueError(f"register({entry.name!r}): a feature of this name exists: rename one.")
    if entry.block is not None and any(entry.block_key == known.block_key for known in _registered if known.block):
        raise ValueError(f"register({entry.name!r}): another feature brings the key {entry.block_key!r}: rename one.")
    _registered.append(entry)


def unregister(name: str) -> None:
    """Forget the feature of that name; runs that have it keep it."""
    _registered[:] = [known for known in _registered if known.name != name]


def registered() -> tuple[Entry, ...]:
    """The features that packages have added, in their order."""
    return tuple(_registered)
