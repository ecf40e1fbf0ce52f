"""Compiled models of transformers beside DDP: weights, graphs and breaks. LoRA needs peft."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.utils import counters

import lt_zero
from tests.support.parity import RELEASE, config_of, full_values
from tests.support.pool import Pool

transformers: Any = pytest.importorskip("transformers", minversion="4.53")
pytestmark = pytest.mark.slow

LAYERS = 2
SIZES = {
    "vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": LAYERS,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0,
    "resid_pdrop": 0.0, "attn_pdrop": 0.0, "embd_pdrop": 0.0, "use_cache": False,
}  # fmt: skip
Row = tuple[str, str, bool]  # kind of model, what is compiled, whether it has adapters


def _made(kind: str, adapted: bool) -> Any:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **SIZES)
    model = transformers.AutoModelForCausalLM.from_config(config)
    if not adapted:
        return model
    import peft  # type: ignore[import-not-found, unused-ignore]

    return peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))


def _batch(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
    tokens = torch.randint(1, 32, (2, 10), generator=generator)
    return {"input_ids": tokens, "labels": tokens}


def _trained(row: Row, stage: int | None) -> tuple[dict[str, Tensor], tuple[int, int]]:
    """Weights, and graphs and breaks; ``stage``: None: DDP."""
    torch._dynamo.reset()
    counters.clear()
    kind, what, adapted = row
    model = _made(kind, adapted)
    layers = [m for m in model.modules() if type(m).__name__ == "LlamaDecoderLayer"]
    for module in [model] if what == "whole" else layers:
        module.compile(backend="eager")
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer: Any = torch.optim.SGD(trained, lr=0.1, momentum=0.9)
    run: nn.Module = model
    if stage is None:
        run = nn.parallel.DistributedDataParallel(model)
    else:
        engine = lt_zero.shard(model, config_of(stage, RELEASE if stage == 3 else {}))
        lt_zero.ShardedOptimizer(engine, optimizer)
    for step in range(3):
        optimizer.zero_grad()
        run(**_batch(step)).loss.backward()
        optimizer.step()
    names = {name for name, p in model.named_parameters() if p.requires_grad}
    values = full_values(engine) if stage is not None else dict(model.named_parameters())
    found = {name: value.detach().clone() for name, value in values.items() if name in names}
    assert found.keys() == names
    return found, (counters["stats"]["unique_graphs"], sum(counters["graph_break"].values()))


def _beside_ddp(row: Row) -> list[tuple[int, int]]:
    """Graphs and breaks of DDP, stage 2 and stage 3."""
    wanted, first = _trained(row, None)
    graphs = [first]
    for stage in (2, 3):
        found, also = _trained(row, stage)
        for name, value in found.items():
            torch.testing.assert_close(value, wanted[name], rtol=1e-5, atol=1e-6, msg=name)
        graphs.append(also)
    return graphs


# docs/compile.md has this table.
TABLE: dict[Row, list[tuple[int, int]]] = {
    ("llama", "whole", False): [(1, 0), (1, 0), (8, 6)],
    ("llama", "layers", True): [(2, 0), (2, 0), (2, 0)],
    ("gpt2", "whole", False): [(2, 3), (2, 3), (7, 6)],
}


@pytest.mark.parametrize("row", TABLE)
def test_weights_graphs_and_breaks_are_those_of_ddp(row: Row) -> None:
    if row[2]:
        pytest.importorskip("peft")
    pool = Pool()  # fresh processes: graphs depend on what a process has compiled before
    try:
        found = pool.run(2, _beside_ddp, row)
    finally:
        pool.close()
    assert found == [TABLE[row]] * 2
