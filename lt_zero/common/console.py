"""rich's consoles, with the rules of output.py."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import IO, Any, cast

import rich.console
from rich.segment import Segment
from typing_extensions import override

from lt_zero.common.output import Lenient, printable


class Console(rich.console.Console):
    """A console of rich's that shows control characters in texts instead of sending them."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.push_render_hook(_Printable())


class RunConsole(Console):
    """A console for what a run prints: if that fails, the run goes on without it."""

    def __init__(self, stderr: bool = False, file: IO[str] | None = None, **options: Any) -> None:
        stream = file if file is not None else sys.stderr if stderr else sys.stdout
        super().__init__(file=cast("IO[str]", Lenient(stream)), stderr=stderr, **options)


class _Printable(rich.console.RenderHook):
    @override
    def process_renderables(self, renderables: list[Any]) -> list[Any]:
        return [_Shown(renderable) for renderable in renderables]


class _Shown:
    """Content for rich's consoles, with its texts made printable."""

    def __init__(self, content: Any) -> None:
        self._content = content

    def __rich_console__(
        self, console: rich.console.Console, options: rich.console.ConsoleOptions
    ) -> Iterable[Segment]:
        for segment in console.render(self._content, options):
            yield segment if segment.control else Segment(printable(segment.text), segment.style)
