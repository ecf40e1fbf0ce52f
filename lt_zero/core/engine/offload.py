"""The offload of one engine, as far as the engine and its steps ask about it; by default nothing is offloaded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from lt_zero.core.comm.ranks import Ranks
from lt_zero.core.comm.world import World
from lt_zero.core.engine.bucket import Bucket
from lt_zero.core.engine.step_flags import Section
from lt_zero.core.stores.io_options import SwapError


@dataclass
class Offload:
    """Keeps everything on the device, so that nothing of it can fail. ``Feature.place`` returns another one.

    Attributes:
        has_files: on some rank.
        overlaps: there is, or was, a background thread on some rank.
        partially_stepped: buckets whose weights are a step ahead; see core/step/background_steps.py.
        others: return errors of other files.
    """

    has_files: bool = False
    overlaps: bool = False
    partially_stepped: str = ""
    others: list[Callable[[], SwapError | None]] = field(default_factory=list)

    @property
    def streams(self) -> bool:
        """True if states are in files, so that a step visits buckets one by one, by ``stream_buckets``."""
        return False

    def stream_buckets(self, buckets: Sequence[Bucket]) -> Iterator[Bucket]:
        """Yield each bucket with its stores in memory; the next is read and the last written meanwhile."""
        return iter(buckets)

    def find_problem(self) -> SwapError | None:
        """The error of this rank, if any. See offload/nvme_store.py, Note [A failing disk]."""
        return next(filter(None, (find() for find in self.others)), None)

    def section(self, peers: Ranks) -> Section:
        """The flag of a step that says whether files of a rank failed; raises SwapError on all ``peers`` then."""

        def raise_problems(flags: Sequence[int]) -> None:
            if any(flags):
                problem = self.find_problem()
                raise SwapError(" ".join(peers.problems(str(problem) if problem else None, "files")))

        return Section("files", lambda: [self.find_problem() is not None], raise_problems)

    def check(self, world: Ranks, name: str) -> None:
        """Raise SwapError on all ranks if one has an error. Collective if there are files or a background step."""

    def refuse_partially_stepped(self, world: World, problem: str = "") -> None:
        """Raise SwapError on all ranks if one stepped buckets in a backward that no step followed. Collective.

        No rank can have done so unless ``overlaps``. ``problem``: another reason to raise, on this rank.
        """

    def note_partially_stepped(self, buckets: str) -> None:
        """Note that ``buckets`` are stepped in a backward, and the others are not yet."""
        self.partially_stepped = buckets

    def end_partially_stepped(self) -> None:
        """Note that the others are stepped, too, or that all weights are replaced."""
        self.partially_stepped = ""

    def accept_partially_stepped(self) -> None:
        """Go on with buckets that are a step ahead, if there are any, with a warning."""

    def require(self, world: World, states: int) -> None:
        """Raise SwapError if a disk has no room for ``states`` states per element. Collective with files."""

    def announce(self, buckets: Sequence[Bucket], states: int) -> str:
        """Measure the disks on all ranks at once: a line for the user, '' if there are no files. Collective.

        ``states``: number of element-wise states of the optimizer.
        """
        return ""

    @property
    def buffer_nbytes(self) -> int:
        """Bytes of memory of buffers through which tensors move."""
        return 0

    @property
    def file_nbytes(self) -> int:
        """Bytes of this rank's files."""
        return 0

    def rest(self) -> None:
        """Stop all threads; they restart when they are needed."""

    def close(self) -> None:
        """Stop the background thread and remove the files."""
