"""The flags of a step: what parts of an engine tell the other ranks, in one exchange on the host.

Each owner declares a section, by name: how many bytes there are of it, on this rank and in this step, and what is done
with their maxima over the ranks. All sections travel in one message, so that one more costs its bytes and no latency.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lt_zero.core.comm.ranks import Ranks
from lt_zero.core.comm.work import Done, Work


@dataclass(frozen=True, eq=False)
class Section:
    """The flags of one owner.

    Attributes:
        name: of the section, which no other has.
        report: returns this rank's flags, from 0 to 255, when an exchange is launched; as many on all ranks.
        handle: is given their maxima, when a step has waited for them. Raises on all ranks or on none.
        launched: is given the work, and the flags (1D uint8), which are the maxima when the work is done: for an owner
            that needs them at another time than the step.
        nothing: the flags of ranks that have nothing to tell; b"": zeros.
    """

    name: str
    report: Callable[[], Iterable[int]]
    handle: Callable[[Sequence[int]], object] | None = None
    launched: Callable[[Work, Tensor], object] | None = None
    nothing: bytes = b""


class ExchangedFlags:
    """One exchange. Indexed by the name of a section, it gives its flags (1D uint8), which may be written.

    Args:
        work: fills ``row`` with the maxima over the ranks.
        row: the flags of all sections (1D uint8).
        places: where those of each section are.
    """

    def __init__(self, work: Work, row: Tensor, places: Mapping[str, slice]) -> None:
        self._work = work
        self._row = row
        self._places = places

    def wait(self) -> None:
        """Wait for the maxima."""
        self._work.wait()

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._places:
            raise KeyError(f"There is no section {name!r} of the step's flags, which has {', '.join(self._places)}.")
        return self._row[self._places[name]]

    def numbers(self) -> dict[str, list[int]]:
        """The flags of each section by its name: read at once, as each look into a tensor takes a microsecond."""
        row = self._row.tolist()
        return {name: row[place] for name, place in self._places.items()}

    def copied(self) -> ExchangedFlags:
        """A copy, with the maxima. Waits for them."""
        self.wait()
        return ExchangedFlags(Done(), self._row.clone(), self._places)


class StepFlags:
    """The exchanges of all sections' flags.

    Args:
        peers: the ranks.
        sections: in the order in which their owners report, and handle the maxima; the same on all ranks. They have a
            flag at least.

    Raises:
        ValueError: two sections have one name.
    """

    def __init__(self, peers: Ranks, sections: Iterable[Section]) -> None:
        self._peers = peers
        self._sections = list(sections)
        self._told = [(section.name, section.launched) for section in self._sections if section.launched is not None]
        self._handled = [(section.name, section.handle) for section in self._sections if section.handle is not None]
        names = [section.name for section in self._sections]
        if twice := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"Two sections of the step's flags are named {twice[0]!r}. Give each a name of its own.")

    def launch(self) -> ExchangedFlags:
        """Launch the exchange of what the owners report. Collective."""
        row = bytearray()
        places = dict[str, slice]()
        for section in self._sections:
            start = len(row)
            row += bytes(section.report())
            places[section.name] = slice(start, len(row))
        flags = torch.frombuffer(row, dtype=torch.uint8)
        work = self._peers.host_max(flags, "used parameters")
        for name, tell in self._told:
            tell(work, flags[places[name]])
        return ExchangedFlags(work, flags, places)

    def handle(self, maxima: Mapping[str, Sequence[int]]) -> None:
        """Let the owners handle the maxima, by name. Raises what they raise."""
        for name, handle in self._handled:
            handle(maxima[name])

    def nothing(self, like: ExchangedFlags) -> ExchangedFlags:
        """An exchange in which no rank had anything to tell, with as many flags as that one."""
        made = ExchangedFlags(Done(), torch.zeros_like(like._row), like._places)
        for section in self._sections:
            if section.nothing:
                made[section.name].copy_(torch.frombuffer(bytearray(section.nothing), dtype=torch.uint8))
        return made
