"""Runs of Lightning's ModelParallelStrategy, saved as a folder or as one file, go on here on any mesh of ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader

from lt_zero.checkpoint.import_ import import_checkpoint
from lt_zero.checkpoint.native.archive import Archive
from lt_zero.parallel.local import is_cut
from tests.support.import_tools import expected_of, makers, source_of
from tests.support.lightning_tools import sharded_trainer, trust
from tests.support.matrix import only_rows
from tests.support.parallel_nets import Ranks
from tests.support.paths import DATA
from tests.support.pool import Pool

BEFORE, STEPS = 3, 2  # of the saved run, and after it


def tokens(data: int) -> Tensor:
    return torch.randint(8, (4,), generator=torch.Generator().manual_seed(data))


def go_on(path: str, ranks: Ranks, stage: int) -> tuple[dict[str, Any], bool, float]:
    """The weights after some more steps (rank 0), whether some were cut, and the learning rate."""
    module = makers("tensor_parallel").Module()
    config = {"tensor_parallel": {"autotp_size": ranks.tensor}}
    steps = {"max_steps": BEFORE + STEPS, "max_epochs": 9}
    trainer = sharded_trainer(stage, config=config, use_distributed_sampler=False, **steps)
    batch = tokens(dist.get_rank() // ranks.tensor)
    trainer.fit(module, DataLoader([batch], batch_size=None), ckpt_path=path, **trust(False))
    assert trainer.global_step == BEFORE + STEPS
    found = {name: value.numpy() for name, value in trainer.strategy.full_state_dict().items()}
    return found, any(map(is_cut, module.parameters())), trainer.optimizers[0].param_groups[0]["lr"]


def reference(case: str, data: int) -> dict[str, Tensor]:
    """The weights after the same steps by torch in one process."""
    expected, module = expected_of(case), makers("tensor_parallel").Module()
    module.load_state_dict(expected["weights"])
    ((optimizer,), _) = module.configure_optimizers()
    for name, parameter in module.named_parameters():
        if name in expected["state"]:
            optimizer.state[parameter] = {key: value.clone() for key, value in expected["state"][name].items()}
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 if step == 0 else 1e-3  # StepLR(2), of epochs that have one step each from here on
        optimizer.zero_grad()
        for rank in range(data):
            (module.training_step(tokens(rank), 0) / data).backward()
        optimizer.step()
    return {name: p.detach() for name, p in module.named_parameters()}


KINDS = [f"tensor_parallel/{mesh}/{kind}" for mesh in ("tp2", "tp2_dp2") for kind in ("folder", "file.pt")]
MESHES = [Ranks(), Ranks(1, 2), Ranks(2, 2), Ranks(3)]
FAST = [
    ("tensor_parallel/tp2_dp2/folder", Ranks(3), 3),
    ("tensor_parallel/tp2/file.pt", Ranks(1, 2), 2),
]


@pytest.mark.parametrize(
    ("case", "ranks", "stage"),
    only_rows(FAST, [(case, ranks, stage) for case in KINDS for ranks in MESHES for stage in range(4)]),
)
def test_a_run_goes_on(pool: Pool, case: str, ranks: Ranks, stage: int) -> None:
    found, cut, rate = pool.run(ranks.all, go_on, str(source_of(case)), ranks, stage)[0]
    assert cut == (ranks.tensor > 1)
    assert rate == pytest.approx(1e-3)
    assert found.pop("calls") == BEFORE + STEPS
    for name, value in reference(case, ranks.data).items():
        np.testing.assert_allclose(found[name], value, rtol=1e-5, atol=1e-6, err_msg=name)
    assert any(
        not np.array_equal(found[name], old) for name, old in expected_of(case)["weights"].items() if name in found
    )


def test_one_file_is_imported_without_states(tmp_path: Any) -> None:
    """Their numbers have no names in it."""
    with pytest.warns(UserWarning, match="nothing in it tells which parameter"):
        out = import_checkpoint(DATA / "tensor_parallel/tp2_dp2/file.pt", tmp_path / "out")
    archive = Archive(out)
    for name, value in expected_of("tensor_parallel/tp2_dp2/file.pt")["weights"].items():
        assert torch.equal(archive.read(name), value), name
