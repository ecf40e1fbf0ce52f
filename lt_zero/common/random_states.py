"""The states of all random number generators that training draws from: capture, set, save, derive for a new rank."""

from __future__ import annotations

import ctypes
import hashlib
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lt_zero.common import accelerator
from lt_zero.common.errors import CheckpointError


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

    def differing(self, other: RandomStates) -> set[str]:
        """Names of the host's generators with other states."""
        same = {
            "torch": torch.equal(self.torch, other.torch),
            "random": self.python == other.python,
            "numpy": str(self._numpy_words()) == str(other._numpy_words()),
        }
        return {name for name, equal in same.items() if not equal}

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
            numpy = dict(zip(("words", "position", "has_gauss", "gauss"), self._numpy_words(), strict=True))
            packed["numpy"] = {**numpy, "words": torch.tensor(numpy["words"], dtype=torch.int64)}
        return packed

    def _numpy_words(self) -> tuple[list[int], int, int, float]:
        inner = self.numpy["state"]
        if "key" not in inner:
            return [], 0, 0, 0.0
        return inner["key"].tolist(), int(inner["pos"]), int(self.numpy["has_gauss"]), float(self.numpy["gauss"])

    @classmethod
    def of(cls, packed: Any, where: str) -> RandomStates:
        """Restore from ``state_dict``; new generators check the states.

        Raises:
            CheckpointError: the states are malformed.
        """
        try:
            host, cuda, python, saved = packed["torch"].cpu(), packed.get("cuda"), packed["python"], packed.get("numpy")
            torch.Generator().set_state(host)
            if cuda is not None and accelerator.in_use():
                cuda = cuda.cpu()
                accelerator.new_generator().set_state(cuda)
            state = (int(python["version"]), tuple(python["words"].tolist()), python["gauss"])
            random.Random().setstate(state)
            numpy = dict(np.random.get_state(legacy=False))
            if saved is not None:
                numpy = {
                    "bit_generator": "MT19937",
                    "state": {"key": np.array(saved["words"].tolist(), dtype=np.uint32), "pos": int(saved["position"])},
                    "has_gauss": int(saved["has_gauss"]),
                    "gauss": float(saved["gauss"]),
                }
                np.random.RandomState().set_state(numpy)
        except (LookupError, TypeError, ValueError, AttributeError, RuntimeError, OverflowError) as error:
            raise CheckpointError(
                f"{where}: the states of the random number generators cannot be read ({error!r}). The checkpoint is "
                "damaged, or was written by another version. Remove this key to resume without them."
            ) from error
        return cls(host, cuda, state, numpy)

    def derived(self, rank: int) -> RandomStates:
        """New states for ``rank``, a deterministic function of these states."""
        seed = int.from_bytes(hashlib.sha256(bytes(self.torch.tolist()) + rank.to_bytes(8, "big")).digest()[:4], "big")
        cuda = accelerator.new_generator().manual_seed(seed).get_state() if accelerator.in_use() else None
        numpy = np.random.RandomState(seed).get_state(legacy=False)
        host = torch.Generator().manual_seed(seed).get_state()
        return RandomStates(host, cuda, random.Random(seed).getstate(), dict(numpy))


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


def own_or_derived(states: Sequence[RandomStates], rank: int) -> RandomStates:
    """This rank's states among those of all saved ranks.

    A new rank gets derived states, unless all saved ranks had equal states: the program may rely on that (a sampler
    that draws the same order on all ranks), so the new rank gets them, too.
    """
    if rank < len(states):
        return states[rank]
    if len(states) > 1 and not any(states[0].differing(other) for other in states[1:]):
        return states[0]
    return states[0].derived(rank)
