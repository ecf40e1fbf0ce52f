"""The states of all random number generators that training draws from: taken, set, saved (saved_random_states.py)."""

from __future__ import annotations

import ctypes
import random
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lt_zero.common import accelerator


@dataclass(frozen=True)
class RandomStates:
    """The states of all generators. Capturing them draws no number and does not synchronize with the device."""

    torch: Tensor
    cuda: Tensor | None  # of the current device
    python: tuple[Any, ...]
    numpy: dict[str, Any]

    @classmethod
    def now(cls) -> RandomStates:
        cuda = accelerator.random_state()
        return cls(torch.get_rng_state(), cuda, random.getstate(), _numpy_state())

    def apply(self) -> None:
        torch.set_rng_state(self.torch)
        if self.cuda is not None:
            accelerator.set_random_state(self.cuda)
        random.setstate(self.python)
        _set_numpy_state(self.numpy)

    def state_dict(self) -> dict[str, Any]:
        """Plain containers and tensors."""
        version, words, gauss = self.python
        packed: dict[str, Any] = {
            "torch": self.torch.clone(),
            "python": {"version": version, "words": torch.tensor(words, dtype=torch.int64), "gauss": gauss},
        }
        if self.cuda is not None:
            packed["cuda"] = self.cuda.clone()
        if self.numpy["bit_generator"] == "MT19937":  # a program may have replaced it
            numpy = dict(zip(("words", "position", "has_gauss", "gauss"), self.numpy_words(), strict=True))
            packed["numpy"] = {**numpy, "words": torch.tensor(numpy["words"], dtype=torch.int64)}
        return packed

    def numpy_words(self) -> tuple[list[int], int, int, float]:
        """The words of numpy's generator, the place among them, and the normal number that waits."""
        inner = self.numpy["state"]
        if "key" not in inner:
            return [], 0, 0, 0.0
        return inner["key"].tolist(), int(inner["pos"]), int(self.numpy["has_gauss"]), float(self.numpy["gauss"])


_WORDS = 625 * 4  # bytes: of the words of a Mersenne twister, and of its place among them
_last_of_numpy: list[tuple[bytes, dict[str, Any]]] = []  # the last state that was taken, and its words


def _numpy_state() -> dict[str, Any]:
    """The state of numpy's global generator, which numpy gives word by word: it is only asked if it has changed.

    A normal number that waits to be drawn is no part of the words. It can come and go only with them, unless one waits.
    """
    bits: Any = np.random.get_bit_generator()  # type: ignore[attr-defined]
    words = b""
    if isinstance(bits, np.random.MT19937):
        words = ctypes.string_at(bits.ctypes.state_address, _WORDS)
        if _last_of_numpy and _last_of_numpy[0][0] == words and not _last_of_numpy[0][1]["has_gauss"]:
            return _last_of_numpy[0][1]
    state = dict(np.random.get_state(legacy=False))
    _last_of_numpy.clear()
    if words:
        _last_of_numpy.append((words, state))
    return state


def _set_numpy_state(state: dict[str, Any]) -> None:
    """Set the state of numpy's global generator, unless the program has replaced that by one of another kind.

    numpy takes a state word by word, too. Where no normal number waits, before and after, the words are all.
    """
    bits: Any = np.random.get_bit_generator()  # type: ignore[attr-defined]
    if not isinstance(bits, np.random.MT19937) or state["bit_generator"] != "MT19937":
        if state["bit_generator"] == type(bits).__name__:
            np.random.set_state(state)
        _last_of_numpy.clear()
        return
    place = bits.ctypes.state_address
    words = state["state"]["key"].tobytes() + int(state["state"]["pos"]).to_bytes(4, sys.byteorder, signed=True)
    known = bool(_last_of_numpy) and _last_of_numpy[0][0] == ctypes.string_at(place, _WORDS)
    if known and not _last_of_numpy[0][1]["has_gauss"] and not state["has_gauss"]:
        with bits.lock:
            ctypes.memmove(place, words, _WORDS)
    else:
        np.random.set_state(state)
    _last_of_numpy[:] = [(words, state)]
