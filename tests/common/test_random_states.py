"""Random states are taken and set as the generators do it themselves, also where numpy keeps a number back."""

from __future__ import annotations

import random

import numpy as np
import torch

from lt_zero.common.random_states import RandomStates
from lt_zero.common.saved_random_states import derived


def _drawn() -> list[float]:
    numbers = [np.random.randn(), np.random.rand(), float(np.random.randint(9)), np.random.randn()]
    return [*numbers, torch.rand(()).item(), random.random()]


def test_numbers_are_drawn_again() -> None:
    """numpy makes two normal numbers at once, and keeps one for the next call."""
    before = RandomStates.now()
    try:
        for trial in range(24):
            np.random.seed(trial)
            np.random.rand(trial % 7)
            if trial % 3 == 0:
                np.random.randn()
            here = RandomStates.now()
            drawn = _drawn()
            there = derived(here, 3)
            there.apply()
            other = _drawn()
            if trial % 4 == 0:
                np.random.randn()
            for states, numbers in ((here, drawn), (there, other), (here, drawn)):
                states.apply()
                RandomStates.now()
                assert _drawn() == numbers
            here.apply()
            if trial % 2:
                np.random.randn()  # one waits
            there.apply()
            assert _drawn() == other
    finally:
        before.apply()
