"""The loop without a Trainer that docs/concepts.md shows, and what it may be given."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import lt_zero
from lt_zero.common.ports import free_port
from lt_zero.training.build import built_by
from tests.support.docs_tools import BLOCKS
from tests.support.lightning_tools import torchrun_env
from tests.support.models import Net, next_token_loss
from tests.support.parity import config_of, full_values
from tests.support.pool import Pool


def _text() -> str:
    (block,) = (b for b in BLOCKS if b.page == "docs/concepts.md" and b.marks.get("run by") == "test_loop")
    return block.text


def _run(text: str, folder: Path, port: int) -> None:
    os.environ.update(torchrun_env() | {"MASTER_PORT": str(port)})
    dist.destroy_process_group()  # the text makes one
    os.chdir(folder)
    try:
        exec(compile(text, "docs/concepts.md", "exec"), {"__name__": "__main__"})
    finally:
        os.chdir("/")


def _expected() -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in torch.randn(8, 2, 16, 32):
        for rows in step:
            (model(rows).square().mean() / 2).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def test_the_documented_loop_trains_as_one_process(pool: Pool, tmp_path: Path) -> None:
    pool.run(2, _run, _text(), tmp_path, free_port())
    got, want = torch.load(tmp_path / "model.pt"), _expected()
    assert got.keys() == want.keys()
    for name, value in want.items():
        torch.testing.assert_close(got[name], value, rtol=1e-5, atol=1e-6)


def _configured(config: Any) -> None:
    torch.manual_seed(0)
    net = Net()
    reference = copy.deepcopy(net)
    engine = lt_zero.shard(net, config)
    assert built_by(engine).zero_optimization.stage == 2
    optimizer = lt_zero.ShardedOptimizer(engine, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9))
    expected = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
    for step in range(3):
        losses = []
        for model, mine in ((net, optimizer), (reference, expected)):

            def closure(model: nn.Module = model, step: int = step) -> Tensor:
                loss = next_token_loss(model, step, 0, 0)
                loss.backward()
                return loss.detach()

            mine.zero_grad()
            losses.append(mine.step(closure))
        torch.testing.assert_close(losses[0], losses[1])
    for name, value in full_values(engine).items():
        torch.testing.assert_close(value, dict(reference.named_parameters())[name].detach())


@pytest.mark.parametrize("kind", ["stage", "dict", "file"])
def test_a_loop_is_configured_as_the_strategy_is(pool: Pool, tmp_path: Path, kind: str) -> None:
    path = tmp_path / "zero.json"
    path.write_text('{"zero_optimization": {"stage": 2}}')
    config = {"stage": lt_zero.ZeroConfig(stage=2), "dict": {"zero_optimization": {"stage": 2}}, "file": str(path)}
    pool.run(2, _configured, config[kind])


def test_the_stage_goes_with_other_keys() -> None:
    given = lt_zero.ZeroConfig(stage=2, zero_optimization={"reduce_bucket_size": 7}, gradient_clipping=0.5)
    assert given == lt_zero.ZeroConfig.of(
        {"zero_optimization": {"stage": 2, "reduce_bucket_size": 7}, "gradient_clipping": 0.5}
    )
    block = lt_zero.ZeroConfig.of({"zero_optimization": {"stage": 1, "reduce_bucket_size": 7}}).zero_optimization
    assert lt_zero.ZeroConfig(stage=2, zero_optimization=block, gradient_clipping=0.5) == given
    with pytest.raises(lt_zero.ConfigError, match=r"stage is not a key .* zero_optimization\.stage"):
        lt_zero.ZeroConfig.of({"stage": 3})


def _halves() -> None:
    engine = lt_zero.shard(Net(), config_of(2, dtype=torch.float16))
    optimizer = lt_zero.ShardedOptimizer(engine, torch.optim.SGD(engine.root.parameters(), lr=0.1))
    with pytest.raises(RuntimeError, match="fp16 needs a loss scale"):
        optimizer.step()


def test_fp16_without_a_trainer_is_refused(pool: Pool) -> None:
    pool.run(2, _halves)
