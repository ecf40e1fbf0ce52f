"""Drawings of ranks: their numbers, and what is left out of long axes."""

from __future__ import annotations

from rich.console import Console

from lt_zero.planning.drawing import rank_table


def rows(text: str, first: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines() if line.split()[:1] == [first]]


def test_a_drawing_of_three_axes() -> None:
    console = Console(record=True, width=100)
    console.print(rank_table({"outer": 2, "data": 10, "tensor": 3}, per_node=6))
    text = console.export_text()
    assert ["1", "2", "36", "37", "38", "6"] in rows(text, "1")
    assert ["0", "...", "...", "...", "...", "..."] in rows(text, "0")
    assert ["1", "9", "57", "58", "59", "9"] in rows(text, "1")
    console.print(rank_table({"data": 1, "tensor": 4}, per_node=2))
    assert "0 to 1" in console.export_text(), "a row on two nodes"
