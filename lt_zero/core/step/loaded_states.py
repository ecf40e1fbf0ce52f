"""States that torch's ``load_state_dict`` gives to a sharded optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lt_zero.core.step.param_groups import ShardedParamGroups


class LoadedStates:
    """Gives loaded states the dtypes in which they were saved, and offloaded ones their place.

    torch casts states to the parameter's dtype and device, but those of master weights may have more bits.

    Args:
        fragments: of an optimizer.
    """

    def __init__(self, fragments: ShardedParamGroups) -> None:
        self._fragments = fragments
        self._given: Mapping[str, Any] = {}  # the state dict that is being loaded

    def install(self) -> list[RemovableHandle]:
        """Install hooks around the optimizer's ``load_state_dict``."""
        optimizer = self._fragments.optimizer
        return [
            optimizer.register_load_state_dict_pre_hook(self._begin),
            optimizer.register_load_state_dict_post_hook(self._end),
        ]

    def _begin(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        engine = self._fragments.engine
        engine.finish_steps()
        engine.exchange.forget_states()
        self._given = state

    def _end(self, optimizer: Optimizer) -> None:
        given, self._given = self._given, {}
        numbers = [number for group in given["param_groups"] for number in group["params"]]
        for number, parameter in zip(numbers, self._fragments.parameters(), strict=True):
            place, states = self._fragments.engine.owner.get(id(parameter)), optimizer.state.get(parameter, {})
            offloaded = place is not None and place[0].offloaded
            for key, value in given["state"].get(number, {}).items():
                known = states.get(key)
                if not isinstance(value, Tensor) or not isinstance(known, Tensor):
                    continue
                if (offloaded or known.dtype != value.dtype) and _is_cast_of(known, value):
                    here = value.to("cpu" if offloaded else known.device, copy=True)
                    in_form = place is not None and value.dim() > 0 and place[0].storage.moments.keeps(value)
                    states[key] = place[0].storage.moments.kept(here, key) if place is not None and in_form else here


def _is_cast_of(loaded: Tensor, value: Tensor) -> bool:
    """True if torch made ``loaded`` of ``value``, and not of what a user's hook has put into its place."""
    return loaded.shape == value.shape and torch.allclose(loaded, value.to(loaded), rtol=0, atol=0, equal_nan=True)
