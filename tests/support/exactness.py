"""The claims of docs/exactness.md, each with what measures it: ``python -m tests.support.exactness`` writes the table.

A claim is a comparison of two runs. The table says what the measurement found: the same bits, or a difference within
the claim's bound. No claim depends on the vector instructions of a CPU: both runs of a comparison use the same.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import lt_zero
from tests.support.lightning_tools import GPT, sharded_trainer, weights
from tests.support.models import Net, tokens
from tests.support.parity import OPTIMIZERS, RELEASE, config_of, full_values
from tests.support.paths import ROOT
from tests.support.pool import Pool

PAGE = ROOT / "docs/exactness.md"
STEPS, ROWS = 3, 12
TABLE = re.compile(r"(?<=\n)\| compared \|.*?(?=\n\n)", re.DOTALL)
Weights = dict[str, Any]  # name -> numpy array


@dataclass(frozen=True)
class Run:
    """One training run; ``keys`` are of the configuration's top level, ``{folder}`` in values is an empty folder."""

    stage: int = 0
    ranks: int = 3
    zero: dict[str, Any] = field(default_factory=dict)
    low: bool = False  # weights in bf16
    micros: int = 1
    optimizer: str = "adamw"
    sockets: bool = False  # between ranks, instead of shared memory
    keys: dict[str, Any] = field(default_factory=dict)

    def of(self, pool: Pool) -> Weights:
        """The weights after ``STEPS`` steps."""
        env = {"LT_ZERO_SHARED_MEMORY": "0" if self.sockets else "1"}
        with tempfile.TemporaryDirectory() as folder:
            found: Weights = pool.run(self.ranks, _trained, self, folder, env=env)[0]
        return found


def _loss(model: Net, batch: Tensor) -> Tensor:
    return F.cross_entropy(model(batch).flatten(0, 1).float(), batch.roll(-1, 1).flatten())


def _batch(step: int) -> Tensor:
    return tokens(step, 0, 0, rows=ROWS)


def _trained(run: Run, folder: str) -> Weights:
    torch.manual_seed(0)
    model, zero = Net(), _filled(run.zero, folder)
    engine = lt_zero.shard(model, config_of(run.stage, zero, torch.bfloat16 if run.low else None, **run.keys))
    optimizer = OPTIMIZERS[run.optimizer](model.parameters())
    lt_zero.ShardedOptimizer(engine, optimizer)
    for step in range(STEPS):
        optimizer.zero_grad()
        parts = _batch(step).chunk(dist.get_world_size())[dist.get_rank()].chunk(run.micros)
        for number, part in enumerate(parts):
            with engine.no_sync() if number < run.micros - 1 else nullcontext():
                (_loss(model, part) / run.micros).backward()
        optimizer.step()
    return {name: value.numpy() for name, value in full_values(engine).items()}


def _looped(stage: int, micros: int) -> Weights:
    """The weights of a loop with ``lt_zero.initialize``, which averages micro-batches, and clips."""
    torch.manual_seed(0)
    model = Net()
    config = {"zero_optimization": {"stage": stage}, "gradient_clipping": 0.05, "train_micro_batch_size_per_gpu": 1}
    config["gradient_accumulation_steps"] = micros
    made = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    engine, *_ = lt_zero.initialize(model=model, optimizer=made, config=config)
    for step in range(STEPS):
        for number in range(micros):
            engine.backward(_loss(model, tokens(step, number, dist.get_rank(), rows=2)))
            engine.step()
    found = {name: value.numpy() for name, value in full_values(engine.engine).items()}
    engine.destroy()
    return found


def _loops(micros: int, *stages: int) -> Callable[[Pool], Sequence[Weights]]:
    return lambda pool: [pool.run(3, _looped, stage, micros)[0] for stage in stages]


def _filled(values: Any, folder: str) -> Any:
    if isinstance(values, dict):
        return {key: _filled(value, folder) for key, value in values.items()}
    return values.format(folder=folder) if isinstance(values, str) else values


def _plain(optimizer: str) -> Weights:
    """The same steps of one process without lt_zero."""
    torch.manual_seed(0)
    model = Net()
    made = OPTIMIZERS[optimizer](model.parameters())
    for step in range(STEPS):
        made.zero_grad()
        _loss(model, _batch(step)).backward()
        made.step()
    return {name: parameter.detach().numpy() for name, parameter in model.named_parameters()}


def _fit(stage: int, epochs: int, save: str | None = None, resume: str | None = None) -> Weights:
    """A Trainer's weights, with the optimizer states and the schedule of a checkpoint."""
    options = {"max_epochs": epochs, "use_distributed_sampler": False, "limit_val_batches": 0}
    trainer = sharded_trainer(stage, **options)
    trainer.fit(GPT(dist.get_world_size(), optimizer="adamw"), ckpt_path=resume)
    if save is not None:
        trainer.save_checkpoint(save)
    return weights(trainer)


class _Dropping(GPT):
    """With dropout, which draws from the generator that a validation's loader takes its seed from."""

    def loss(self, batch: Tensor) -> Tensor:
        logits = F.dropout(self.net(batch), 0.2, self.training) * self.temperature.mean(0)
        return F.cross_entropy(logits.flatten(0, 1), batch.roll(-1, 1).flatten())


def _dropped(strategy: str, validations: int) -> Weights:
    options: dict[str, Any] = {"max_epochs": 2, "limit_val_batches": validations, "use_distributed_sampler": False}
    trainer = sharded_trainer(2, **options, **({"strategy": strategy} if strategy else {}))
    trainer.fit(_Dropping(dist.get_world_size()))
    return weights(trainer)


def _with_dropout(*runs: tuple[str, int]) -> Callable[[Pool], Sequence[Weights]]:
    return lambda pool: [pool.run(2, _dropped, *run)[0] for run in runs]


def _resumed(stages: tuple[int, int], ranks: tuple[int, int]) -> Callable[[Pool], tuple[Weights, Weights]]:
    """A run that goes on from a checkpoint, and the run at the first stage that was not interrupted."""

    def measure(pool: Pool) -> tuple[Weights, Weights]:
        with tempfile.TemporaryDirectory() as folder:
            pool.run(ranks[0], _fit, stages[0], 1, f"{folder}/x.ckpt")
            again = pool.run(ranks[1], _fit, stages[1], 2, None, f"{folder}/x.ckpt")[0]
        return again, pool.run(ranks[0], _fit, stages[0], 2)[0]

    return measure


def _all(*runs: Run) -> Callable[[Pool], Sequence[Weights]]:
    return lambda pool: [run.of(pool) for run in runs]


@dataclass(frozen=True)
class Claim:
    """``measure`` returns runs that are compared with the first; ``bound``: of relative differences, 0 for none."""

    compared: str
    measure: Callable[[Pool], Sequence[Weights]]
    why: str
    bound: float = 0.0

    def row(self, pool: Pool) -> str:
        """The row of the table, from a measurement.

        Raises:
            AssertionError: the runs differ by more than ``bound``.
        """
        first, *others = self.measure(pool)
        worst = max(_distance(first, other) for other in others)
        assert worst <= self.bound, f"{self.compared}: differ by {worst}"
        found = f"differ, by less than {self.bound:.0e}".replace("e-0", "e-") if worst else "the same bits"
        return f"| {self.compared} | {found} | {self.why} |"


def _distance(got: Weights, want: Weights) -> float:
    """The largest difference, relative to the largest weight of its tensor."""
    assert got.keys() == want.keys()
    return max(float(np.abs(got[name] - want[name]).max() / np.abs(want[name]).max()) for name in want)


_HOST: dict[str, Any] = {"offload_optimizer": {"device": "cpu"}}
_FILES: dict[str, Any] = {"offload_optimizer": {"device": "nvme", "nvme_path": "{folder}"}}
_RECOMPUTED: dict[str, Any] = {"activation_checkpointing": {"mode": "full"}}
_GROUPS = {"mics_shard_size": 2}
_COMPILED: dict[str, Any] = {"compile": {"backend": "aot_eager"}}
CLOSE = 1e-5

CLAIMS = [
    Claim(
        "a run, and the same run again",
        _all(Run(3), Run(3)),
        "ranks reduce buckets in a fixed order, and each sum adds the ranks' parts in the order of ranks",
    ),
    Claim(
        "stages 0, 1, 2 and 3, one micro-batch a step",
        _all(*(Run(stage) for stage in range(4))),
        "the stages differ in where elements are kept, not in what is added or how an element is stepped",
    ),
    Claim(
        "stages 0, 1, 2 and 3 with weights in bf16",
        _all(*(Run(stage, low=True) for stage in range(4))),
        "the same; master weights, moments and sums are fp32 at every stage",
    ),
    Claim(
        "stages 0 and 1, two micro-batches a step",
        _all(Run(0, micros=2), Run(1, micros=2)),
        "both add micro-batches on each rank, then the ranks",
    ),
    Claim(
        "stages 0 and 1, three micro-batches a step",
        _all(Run(0, micros=3), Run(1, micros=3)),
        "the same; each loss is divided by three before its backward",
    ),
    Claim(
        "stages 0 and 1, three micro-batches a step, clipped (`lt_zero.initialize`)",
        _loops(3, 0, 1),
        "sums are multiplied by a third and by the factor of clipping at once, in one number",
    ),
    Claim(
        "stages 2 and 3, three micro-batches a step, clipped (`lt_zero.initialize`)",
        _loops(3, 2, 3),
        "the same",
    ),
    Claim(
        "stages 2 and 3, two micro-batches a step",
        _all(Run(2, micros=2), Run(3, micros=2)),
        "both add the ranks after each micro-batch, as no rank keeps a whole gradient",
    ),
    Claim(
        "stages 1 and 2, two micro-batches a step",
        _all(Run(1, micros=2, optimizer="sgd"), Run(2, micros=2, optimizer="sgd")),
        "the two orders of addition above; floating-point sums depend on it",
        CLOSE,
    ),
    Claim(
        "4 ranks as one group, and in shard groups of 2 (`mics_shard_size`), one micro-batch a step, sockets",
        _all(Run(2, ranks=4, sockets=True), Run(2, ranks=4, zero=_GROUPS, sockets=True)),
        "each group adds its ranks first, then the groups' sums are added",
        CLOSE,
    ),
    Claim(
        "the same with shared memory",
        _all(Run(2, ranks=4), Run(2, ranks=4, zero=_GROUPS)),
        "each rank reads the gradients of all ranks there, in their order",
    ),
    Claim(
        "stages 2 and 3 in shard groups of 2, three micro-batches a step, sockets",
        _all(*(Run(stage, ranks=4, zero=_GROUPS, micros=3, sockets=True) for stage in (2, 3))),
        "both add the ranks of a group after each micro-batch, and the groups after the last one",
    ),
    Claim(
        "4 ranks as one group, and in shard groups of 2, three micro-batches a step, sockets",
        _all(Run(2, ranks=4, micros=3, sockets=True), Run(2, ranks=4, zero=_GROUPS, micros=3, sockets=True)),
        "groups are added once a step, after the micro-batches",
        CLOSE,
    ),
    Claim(
        "weights kept, or released after forward (stage 3)",
        _all(Run(3), Run(3, zero=RELEASE)),
        "a gather copies",
    ),
    Claim(
        "buckets of any size",
        _all(Run(2), Run(2, zero={"reduce_bucket_size": 300}), Run(3, zero={"stage3_param_persistence_threshold": 40})),
        "elements are added and stepped one by one, whichever bucket they are in",
    ),
    Claim(
        "ranks of a machine that share memory, or use sockets",
        _all(Run(2), Run(2, sockets=True)),
        "both add in the order of ranks",
    ),
    Claim(
        "optimizer states in device memory, in host memory, or in files",
        _all(Run(2), Run(2, zero=_HOST), Run(2, zero=_FILES)),
        "copies; on a CPU the same kernel steps them. With GPUs the CPU's kernel steps offloaded states",
    ),
    Claim(
        "activations kept, or recomputed",
        _all(Run(3), Run(3, keys=_RECOMPUTED)),
        "the same operations on the same values",
    ),
    Claim(
        "blocks compiled by torch with the backend `aot_eager`, or not compiled",
        _all(Run(3), Run(3, keys=_COMPILED), Run(2, keys=_COMPILED)),
        "the same operations on the same values; `inductor` joins operations, which rounds otherwise",
    ),
    Claim(
        "a resume, and the run that was not interrupted",
        _resumed((3, 3), (2, 2)),
        "a checkpoint has master weights, states, schedules, random states, the position in the data and logged values",
    ),
    Claim(
        "a resume at another stage",
        _resumed((3, 1), (2, 2)),
        "elements are cut anew; nothing is computed. Several micro-batches a step: see stages 1 and 2",
    ),
    Claim(
        "a resume with another number of ranks",
        _resumed((3, 3), (2, 3)),
        "other micro-batches of the same batch: see the next row",
        CLOSE,
    ),
    Claim(
        "dropout, with a validation after each epoch, and without validations",
        _with_dropout(("", 2), ("", 0)),
        "validation inside `fit` restores the random states; under DDP it does not",
    ),
    Claim(
        "dropout, stage 2 and DDP, without validations",
        _with_dropout(("", 0), ("ddp", 0)),
        "the same random numbers; means are rounded in another order",
        CLOSE,
    ),
    Claim(
        "2 ranks and 3 ranks, the same batch",
        _all(Run(2, ranks=2, optimizer="sgd"), Run(2, ranks=3, optimizer="sgd")),
        "means over other micro-batches are added in another order",
        CLOSE,
    ),
    Claim(
        "2 ranks, and one process of plain torch with the whole batch",
        lambda pool: [Run(2, ranks=2, optimizer="sgd").of(pool), _plain("sgd")],
        "as the row before",
        CLOSE,
    ),
]


def table(rows: Sequence[str]) -> str:
    return "\n".join(["| compared | result | why |", "|---|---|---|", *rows])


def main() -> None:
    """Measure all claims, and write the table into the page."""
    pool = Pool()
    try:
        rows = [claim.row(pool) for claim in CLAIMS]
    finally:
        pool.close()
    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(TABLE.sub(lambda _: table(rows), page), encoding="utf-8")
    print(table(rows))


if __name__ == "__main__":
    main()
