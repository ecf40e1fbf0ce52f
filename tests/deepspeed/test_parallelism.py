"""Tensor and sequence ranks as scripts ask DeepSpeed and Accelerate for them: on two ranks, and in whole runs."""

from __future__ import annotations

import warnings
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed.nn
from torch import Tensor, nn
from torch.nn import functional as F

from lt_zero.parallel import sequence_attention
from lt_zero.parallel.sequence.ranks import whole_sequences
from tests.support.huggingface_runs import assert_same_weights, run_all
from tests.support.pool import Pool

BATCH = 2
LENGTH = 8
VOCABULARY = 11


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.places = nn.Embedding(VOCABULARY, 8), nn.Embedding(LENGTH, 8)
        self.qkv, self.head = nn.Linear(8, 24), nn.Linear(8, VOCABULARY)
        self.attend = sequence_attention()

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None, **more: Any) -> Tensor:
        places = torch.arange(input_ids.shape[1]) if position_ids is None else position_ids
        x = self.embed(input_ids) + self.places(places)
        q, k, v = self.qkv(x).view(*input_ids.shape, 6, 4).transpose(1, 2).chunk(3, 1)
        return self.head(x + self.attend(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


def batches(rank: int, count: int) -> list[dict[str, Tensor]]:
    """Of a rank's own loader; the first tokens are prompts, so that parts have other numbers of labels."""
    made = torch.Generator().manual_seed(rank)
    rows = [torch.randint(0, VOCABULARY, (BATCH, LENGTH), generator=made) for _ in range(count)]
    found = [{"input_ids": row, "labels": row.clone()} for row in rows]
    for number, batch in enumerate(found):
        batch["labels"][:, : number + 2] = -100
    return found


def mean_of_parts(logits: Tensor, labels: Tensor, group: Any) -> Tensor:
    """The mean over the tokens of all parts, as scripts for DeepSpeed compute it."""
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
    gather = torch.distributed.nn.functional.all_gather
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        losses, counts = (torch.stack(list(gather(x, group=group))) for x in (loss, (labels != -100).sum()))
    return torch.where(counts > 0, losses * counts, 0.0).sum() / counts.sum()


def _adapted() -> None:
    """DeepSpeed's recipe for sequences over two ranks gives the weights of one process."""
    from lt_zero.deepspeed.adapter import UlyssesSPDataLoaderAdapter
    from lt_zero.deepspeed.engines import initialize
    from lt_zero.deepspeed.ranks import get_sequence_parallel_group, get_sequence_parallel_world_size
    from lt_zero.deepspeed.sequence import UlyssesSPAttentionHF

    torch.manual_seed(0)
    model = Net().double()
    twin, rank = deepcopy(model), torch.distributed.get_rank()
    assert UlyssesSPAttentionHF.register_with_transformers(model, "sdpa", 1, 1) is None
    mpu = UlyssesSPAttentionHF.register_with_transformers(
        model_name_or_path=model,
        core_attn_implementation="sdpa",
        sequence_parallel_size=2,
        micro_batch_size=BATCH,
        seq_length_is_variable=True,
        disable_in_eval=True,
    )
    assert mpu is not None
    assert (mpu.get_sequence_parallel_world_size(), mpu.get_sequence_parallel_rank()) == (2, rank)
    place = {"sp_rank": rank, "sp_group": mpu.get_sequence_parallel_group(), "sp_world_size": 2, "device": "cpu"}
    early = UlyssesSPDataLoaderAdapter(batches(rank, 1), **place)
    assert len(early) == 2
    with pytest.raises(RuntimeError, match="Iterate after"):
        next(early)
    config = {"zero_optimization": {"stage": 3}, "gradient_accumulation_steps": 2, "gradient_clipping": 0.5}
    made = torch.optim.SGD(model.parameters(), 0.5, momentum=0.9)
    engine, *_ = initialize(model=model, optimizer=made, config=config, mpu=mpu)
    assert get_sequence_parallel_world_size() == 2
    plain = torch.optim.SGD(twin.parameters(), 0.5, momentum=0.9)
    loader = UlyssesSPDataLoaderAdapter(batches(rank, 2), **place)
    for step, part in enumerate(loader):
        assert part["input_ids"].shape == (BATCH, 4)
        assert "labels" not in part
        loss = mean_of_parts(engine(**part), part["shift_labels"], get_sequence_parallel_group())
        engine.backward(loss)
        engine.step()
        whole = batches(step % 2, 2)[step // 2]  # of the ranks in turn
        with whole_sequences():  # the twin has the same attention
            logits = twin(whole["input_ids"])
        wanted = F.cross_entropy(logits[:, :-1].flatten(0, 1), whole["labels"][:, 1:].flatten())
        torch.testing.assert_close(loss, wanted)
        (wanted / 2).backward()
        if step % 2:
            nn.utils.clip_grad_norm_(twin.parameters(), 0.5)
            plain.step()
            plain.zero_grad()
    assert step == 3
    assert len(list(loader)) == 4  # the next epoch
    engine.eval()
    own = batches(5 + rank, 1)[0]["input_ids"]  # whole rows, others on each rank
    with torch.no_grad():
        found = engine(input_ids=own)
        with whole_sequences():
            torch.testing.assert_close(found, twin(own))
    uneven = UlyssesSPDataLoaderAdapter(batches(rank, 1 + rank))
    with pytest.raises(RuntimeError, match="rank 0 of a sequence has no batch any more"):
        list(uneven)
    engine.destroy()


def _each_part_alone() -> list[str]:
    """The warnings of a script that takes the mean over the tokens of each part."""
    from lt_zero.deepspeed.adapter import UlyssesSPDataLoaderAdapter
    from lt_zero.deepspeed.engines import initialize

    torch.manual_seed(0)
    model, rank = Net(), torch.distributed.get_rank()
    config = {"zero_optimization": {"stage": 2}, "sequence_parallel_size": 2}
    engine, *_ = initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), 0.1), config=config)
    part = next(UlyssesSPDataLoaderAdapter(batches(rank, 1)))
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        loss = F.cross_entropy(engine(**part).flatten(0, 1), part["shift_labels"].flatten())
        engine.backward(loss)
    engine.step()
    engine.destroy()
    return [str(warning.message) for warning in seen]


def _sequences() -> None:
    _adapted()
    told = _each_part_alone()
    assert [text for text in told if "differs over the parts" in text] == told[:1] * (
        torch.distributed.get_rank() == 0
    ), told


def test_sequences_that_a_script_cuts(pool: Pool) -> None:
    pool.run(2, _sequences)


# ---- sizes beside the configuration ----------------------------------------------------------------------------------


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))


RULES = [
    {"patterns": ["up.*"], "partition_type": "column"},
    {"patterns": ["down.weight"], "partition_type": "row"},
    {"patterns": ["down.bias"], "partition_type": "skip"},
]


def _tensors() -> None:
    """``tp_model_init`` as transformers calls it: with the whole configuration, which counts tensor ranks as data."""
    from lt_zero.deepspeed.engines import initialize, tp_model_init

    torch.manual_seed(0)
    model, x = Layers().double(), torch.randn(3, 6, dtype=torch.float64)
    twin = deepcopy(model)
    config: dict[str, Any] = {
        "zero_optimization": {"stage": 2},
        "train_micro_batch_size_per_gpu": 3,
        "gradient_accumulation_steps": 1,
        "train_batch_size": 6,
        "tensor_parallel": {"autotp_size": 2, "partition_config": {"layer_specs": RULES}},
    }
    tp_model_init(model, 2, torch.float64, config=config)
    made = torch.optim.SGD(model.parameters(), 0.1)
    engine, *_ = initialize(model=model, optimizer=made, config=config)
    assert (engine.train_batch_size(), engine.data_ranks) == (3, 1)
    engine.backward(engine(x).square().mean())
    engine.step()
    loss = twin(x).square().mean()
    loss.backward()
    nn.utils.clip_grad_norm_(twin.parameters(), 1.0)
    torch.optim.SGD(twin.parameters(), 0.1).step()
    torch.testing.assert_close(engine(x), twin(x))
    engine.destroy()


def test_tensor_ranks_of_the_configuration(pool: Pool) -> None:
    pool.run(2, _tensors)


@pytest.fixture
def parallelism(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Sizes of Accelerate's ``ParallelismConfig`` in a run by DeepSpeed, without Accelerate."""
    import sys

    sizes = SimpleNamespace(tp_size=1, sp_size=1, cp_size=1, dp_replicate_size=1, dp_shard_size=1)
    shared = {"parallelism_config": sizes, "distributed_type": SimpleNamespace(value="DEEPSPEED")}
    state = SimpleNamespace(AcceleratorState=SimpleNamespace(_shared_state=shared))
    monkeypatch.setitem(sys.modules, "accelerate.state", state)
    return sizes


def test_sizes_of_accelerate_are_keys(parallelism: SimpleNamespace) -> None:
    from lt_zero.deepspeed.engines import _overrides

    def keys(**zero: Any) -> list[str]:
        config = {"zero_optimization": {"stage": 3, **zero}, "gradient_clipping": 1.0}
        return _overrides({"model": nn.Linear(1, 1), "config": config})

    assert keys() == []
    parallelism.dp_replicate_size = 4  # Accelerate's own, of all ranks: plain data parallelism
    assert keys() == []
    parallelism.dp_shard_size, parallelism.tp_size = 2, 2
    assert keys() == ["tensor_parallel.autotp_size=2", "zero_optimization.dp_replicate_size=4"]
    with pytest.raises(ValueError, match=r"dp_replicate_size=4\), but zero_optimization.dp_replicate_size=2"):
        keys(dp_replicate_size=2)
    parallelism.cp_size = 2
    with pytest.raises(ValueError, match=r"cp_size=2.*sp_size=2"):
        keys()


# ---- whole runs ------------------------------------------------------------------------------------------------------

EVEN = {"sizes": {"vocab_size": 68}}  # tensor ranks share it
TRAINER: dict[str, Any] = {"face": "trainer"}
LOOP: dict[str, Any] = {"face": "accelerate", "ends": False, "decay_after": 1000}
# transformers takes the mean of micro-batches there, and else one over the labels of all of a step
CUT: dict[str, Any] = {"accumulation": 2, "average_tokens": False}

# Run -> the options, and the run of DistributedDataParallel with the same samples, and its ranks.
TWO: dict[str, tuple[dict[str, Any], str, int]] = {
    "autotp, 3": ({**TRAINER, **EVEN, "stage": 3, "tensor": 2}, "trainer, even", 1),
    "autotp, 2": ({**TRAINER, **EVEN, "stage": 2, "tensor": 2}, "trainer, even", 1),
    "tp_size, 2": ({**TRAINER, **EVEN, "stage": 2, "parallelism": {"tp_size": 2}}, "trainer, even", 1),
    "sp_size, 3": ({**TRAINER, **CUT, "stage": 3, "parallelism": {"sp_size": 2}}, "trainer, of ranks", 2),
    "sp_size, 2": ({**TRAINER, **CUT, "stage": 2, "parallelism": {"sp_size": 2}}, "trainer, of ranks", 2),
    "loop, autotp": ({**LOOP, **EVEN, "stage": 3, "tensor": 2}, "loop, even", 1),
    "loop, tp_size": ({**LOOP, **EVEN, "stage": 3, "parallelism": {"tp_size": 2}}, "loop, even", 1),
    "loop, sp_size": ({**LOOP, "accumulation": 2, "stage": 3, "parallelism": {"sp_size": 2}}, "loop", 2),
}
FOUR: dict[str, tuple[dict[str, Any], str, int]] = {
    "autotp": ({**TRAINER, **EVEN, "stage": 3, "tensor": 2}, "trainer, even", 2),
    "tp_size": ({**TRAINER, **EVEN, "stage": 3, "parallelism": {"tp_size": 2, "dp_shard_size": 2}}, "trainer, even", 2),
    "sp_size, 3": (
        {**TRAINER, **CUT, "stage": 3, "parallelism": {"sp_size": 2, "dp_shard_size": 2}},
        "trainer, of ranks",
        4,
    ),
    "sp_size, 2": (
        {**TRAINER, **CUT, "stage": 2, "parallelism": {"sp_size": 2, "dp_shard_size": 2}},
        "trainer, of ranks",
        4,
    ),
    "replicas": ({**TRAINER, "stage": 3, "parallelism": {"dp_replicate_size": 2, "dp_shard_size": 2}}, "trainer", 4),
    "loop, tp_size": (
        {**LOOP, **EVEN, "stage": 3, "parallelism": {"tp_size": 2, "dp_shard_size": 2}},
        "loop, even",
        2,
    ),
    "loop, sp_size": (
        {**LOOP, "accumulation": 2, "stage": 3, "parallelism": {"sp_size": 2, "dp_shard_size": 2}},
        "loop",
        4,
    ),
}
DDP: dict[str, dict[str, Any]] = {
    "trainer": TRAINER,
    "trainer, even": {**TRAINER, **EVEN},
    "trainer, of ranks": {**TRAINER, "average_tokens": False},
    "loop": LOOP,
    "loop, even": {**LOOP, **EVEN},
}


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_parallelism_trains_as_ddp(tmp_path: Path, ranks: int) -> None:
    cases = TWO if ranks == 2 else FOUR
    found = run_all(tmp_path / "own", ranks, {name: options for name, (options, _, _) in cases.items()})
    for size in sorted({size for _, _, size in cases.values()}):
        names = dict.fromkeys(wanted for _, wanted, of in cases.values() if of == size)
        run = {name: {**DDP[name], "stage": None} for name in names}
        references = run_all(tmp_path / f"ddp {size}", size, run)
        for name, (options, wanted, of) in cases.items():
            if of == size:
                rows, other = found[name], references[wanted]
                if options["face"] == "accelerate" and "sp_size" in name:
                    # The adapter of a loader gives parts of its last batch when Accelerate takes the loader for ended.
                    rows, other = rows[:-2], other[:-1]
                    rows, other = rows[: len(other)], other[: len(rows)]
                else:
                    assert_same_weights(tmp_path / "own" / name, tmp_path / f"ddp {size}" / wanted)
                assert len(rows) == len(other) > 2, name
                for row, one in zip(rows, other, strict=True):
                    for key in ("loss", "grad_norm"):
                        assert row[key] == pytest.approx(one[key], rel=1e-5), (name, key, rows, other)
