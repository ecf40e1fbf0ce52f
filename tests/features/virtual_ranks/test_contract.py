"""What the bits of a run depend on: set while it is followed, saved in checkpoints, compared at a resume."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist

import lt_zero
from lt_zero import ConfigError
from lt_zero.common.errors import CheckpointError
from tests.support.features import needs
from tests.support.models import Net
from tests.support.parity import config_of
from tests.support.pool import Pool

pytestmark = needs("virtual_ranks")

CPU = torch.device("cpu")


def saved_by(virtual_ranks: int, threads: int, **others: Any) -> dict[str, Any]:
    """The state of a run with these keys; ``others`` replace the other facts."""
    from lt_zero.features.virtual_ranks.contract import Contract

    state = Contract(virtual_ranks, threads, CPU).state_dict()
    state["others"].update(others)
    return state


@pytest.mark.parametrize(
    ("saved", "key"), [((8, 1), "reproducible.virtual_ranks"), ((4, 7), "reproducible.threads"), ((4, 1), "")]
)
def test_other_keys_are_an_error(saved: tuple[int, int], key: str) -> None:
    from lt_zero.features.virtual_ranks.contract import Contract

    contract = Contract(4, 1, CPU)
    if not key:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            contract.load_state_dict(saved_by(*saved))
        return
    with pytest.raises(CheckpointError, match=rf"{key}=.* written with {max(saved)}.*Set {key}={max(saved)}, or"):
        contract.load_state_dict(saved_by(*saved))


@pytest.mark.parametrize(
    ("fact", "value"),
    [("torch", "1.0"), ("the processor", "AVX9"), ("deterministic algorithms", True)],
)
def test_other_facts_are_a_warning(fact: str, value: Any) -> None:
    from lt_zero.features.virtual_ranks.contract import Contract

    with pytest.warns(UserWarning, match=rf"{fact} \({value} then, .* now\)\. Its bits may differ"):
        Contract(4, 1, CPU).load_state_dict(saved_by(4, 1, **{fact: value}))


def _threads() -> list[int]:
    """The number of threads before, while and after two engines are followed."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        found = [torch.get_num_threads()]
        keys = {"reproducible": {"virtual_ranks": dist.get_world_size(), "threads": 3}}
        engines = [lt_zero.shard(Net(depth=1), config_of(0, **keys)) for _ in range(2)]
        found.append(torch.get_num_threads())
        for engine in engines:
            engine.detach()
            engine.detach()
            found.append(torch.get_num_threads())
    finally:
        torch.set_num_threads(before)
    return found


def test_threads_are_set_while_an_engine_is_followed(pool: Pool) -> None:
    assert pool.run(1, _threads) == [[2, 3, 3, 2]]


def test_a_gpu_needs_deterministic_algorithms(monkeypatch: pytest.MonkeyPatch) -> None:
    from lt_zero.features.virtual_ranks.contract import check_deterministic

    check_deterministic(CPU, 4)
    device = torch.device("cuda", 0)
    with pytest.raises(ConfigError, match=r"reproducible.virtual_ranks=4.*Trainer\(deterministic=True\)"):
        check_deterministic(device, 4)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    check_deterministic(device, 4)


def _names_of_states() -> list[str]:
    from lt_zero.core.followers import states_of

    engine = lt_zero.shard(Net(depth=1), config_of(0, reproducible={"virtual_ranks": 2}))
    return list(states_of(engine))


def test_checkpoints_have_it(pool: Pool) -> None:
    assert pool.run(2, _names_of_states) == [["virtual_ranks"]] * 2
