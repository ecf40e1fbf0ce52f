"""Errors of optimizer states that a hook of the user has changed. Loaded when there is one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lt_zero.common.errors import CheckpointError


def broken(state: Any, what: str, count: int | None) -> CheckpointError:
    """The error of a state that ``check_form`` (pieces.py) does not pass; the arguments are those of it."""
    return CheckpointError(
        f"{what} is no state of one: check the keys. {_problem_of(state, count)}. If a hook changes it "
        "(on_save_checkpoint, on_load_checkpoint, or one of the optimizer's state_dict), let it keep `state` and "
        "`param_groups` as torch's `Optimizer.state_dict` returns them."
    )


def _problem_of(state: Any, count: int | None) -> str:
    """A sentence."""
    if not isinstance(state, Mapping):
        return f"It is a {type(state).__name__}"
    if missing := [key for key in ("state", "param_groups") if key not in state]:
        return f"It has no {missing[0]!r}"
    groups, states = state["param_groups"], state["state"]
    if not isinstance(groups, (list, tuple)):
        return f"Its param_groups are a {type(groups).__name__}"
    for index, group in enumerate(groups):
        if not isinstance(group, Mapping) or not isinstance(group.get("params"), (list, tuple)):
            return f"param_groups[{index}] has no list 'params'"
    if not isinstance(states, Mapping):
        return f"Its state is a {type(states).__name__}"
    for name, entries in states.items():
        if not isinstance(entries, Mapping):
            return f"The state of {name!r} is a {type(entries).__name__}"
    numbers = [number for group in groups for number in group["params"]]
    if len(numbers) != count:
        return f"It has {len(numbers)} parameters, and the optimizer has {count}"
    strange = [str(key) for key in states if key not in numbers]
    return f"It has states of {', '.join(strange[:5])}, which are in none of its groups"
