"""What machines have, errors before anything is allocated, the ladder of settings, and ``lt-zero estimate``."""

from __future__ import annotations

import io
import json
import pickle
import re
import sys
import weakref
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import nn
from typer.testing import CliRunner

import lt_zero
from lt_zero import NotEnoughMemory, Sizes, ZeroConfig, ZeroStrategy
from lt_zero.cli import app
from lt_zero.common.garbage import gc_disabled
from lt_zero.common.host_memory import Available, cgroup_limits, host_memory
from lt_zero.common.tables import show
from lt_zero.common.units import GB, format_bytes
from lt_zero.core.comm import world
from lt_zero.core.comm.process_groups import Communicators
from lt_zero.core.engine.bucket import Bucket
from lt_zero.planning import check, limits
from lt_zero.planning.communicators import NBYTES
from lt_zero.planning.estimate import Machine, cheapest, misfit, settings, settings_table
from lt_zero.planning.limits import check_host_memory
from lt_zero.training.lightning.model_report import unit_table
from tests.support.features import needs, skip_without
from tests.support.lightning_tools import GPT, QUIET
from tests.support.models import Net
from tests.support.pool import Pool

# ---- control groups --------------------------------------------------------------------------------------------


def files(root: Path, contents: dict[str, str]) -> Path:
    for name, text in contents.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


MOUNT_2 = "31 23 0:28 {inside} /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
MOUNT_1 = "35 31 0:32 {inside} /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n"


def test_version_2_nested(tmp_path: Path) -> None:
    """The tightest of all groups around the process; pages of files that the kernel would drop are free."""
    group = "sys/fs/cgroup/slurm/job"
    root = files(
        tmp_path,
        {
            "proc/self/cgroup": "0::/slurm/job/step\n",
            "proc/self/mountinfo": MOUNT_2.format(inside="/"),
            f"{group}/step/memory.max": "max\n",
            f"{group}/step/memory.current": "5\n",
            f"{group}/memory.max": "1000\n",
            f"{group}/memory.current": "700\n",
            f"{group}/memory.stat": "anon 500\ninactive_file 150\nactive_file 50\n",
            "sys/fs/cgroup/slurm/memory.max": "5000\n",
            "sys/fs/cgroup/slurm/memory.current": "4900\n",
        },
    )
    found = cgroup_limits(root)
    assert [limit.nbytes for limit in found] == [450, 100]
    assert "/slurm/job" in found[0].source
    assert host_memory(root=root).nbytes == 100


def test_version_1_and_a_container(tmp_path: Path) -> None:
    """A container sees its own group as the root of the mount, under the path that the host gave it."""
    root = files(
        tmp_path,
        {
            "proc/self/cgroup": "9:name=systemd:/\n4:memory:/docker/abc\n3:cpuset:/docker/abc\n0::/\n",
            "proc/self/mountinfo": MOUNT_1.format(inside="/docker/abc") + "garbage\n" + MOUNT_2.format(inside="/"),
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "1000\n",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": "600\n",
            "sys/fs/cgroup/memory/memory.stat": "inactive_file 1\ntotal_inactive_file 100\n",
        },
    )
    assert [limit.nbytes for limit in cgroup_limits(root)] == [500]


def test_no_limits(tmp_path: Path) -> None:
    assert cgroup_limits(tmp_path) == []
    unlimited = {
        "proc/self/cgroup": "4:memory:/../outside\n",
        "proc/self/mountinfo": MOUNT_1.format(inside="/"),
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": "600\n",
    }
    assert cgroup_limits(files(tmp_path, unlimited)) == []


def test_this_machine() -> None:
    assert host_memory().nbytes > 0
    with pytest.raises(ValueError, match="max_cpu_gb"):
        ZeroConfig.of({"max_cpu_gb": 0})


def test_the_report_says_what_communicators_have_taken() -> None:
    """A shortage of the GPU's memory, too."""
    engine = lt_zero.shard(nn.Linear(5, 3), ZeroConfig.of({"zero_optimization": {"stage": 2}}))
    texts = []
    for known in (Communicators(), Communicators(7, 1_200_000_000)):
        engine.world.communicators = known
        file = io.StringIO()
        unit_table(engine, Console(file=file))
        cast = lt_zero.estimate(1e6, {"zero_optimization": {"stage": 2}})
        with mock.patch.object(limits, "device_memory", return_value=Available(10, "free memory of a GPU")):
            texts.append((file.getvalue(), check._gpu_problem(cast, list(cast.phases), 0, engine.world)))
    engine.detach()
    assert not any("communicators" in text for text in texts[0])
    assert "1.20 GB of 7 communicators are taken of this rank's cpu memory" in texts[1][0]
    assert "free memory of a GPU, without 1.20 GB of 7 communicators" in texts[1][1]


def test_a_gpu_needs_room_for_nccl() -> None:
    """Beside what the engine allocates, and none for one rank or on CPUs."""
    config = {"zero_optimization": {"stage": 1}}
    cast = lt_zero.estimate(1e9, config, world=8)
    assert cast.communicators == 3 * NBYTES
    assert "NCCL: 3 communicators of about 308.28 MB on each GPU" in str(cast)
    room = cast.rank("device") + cast.communicators
    assert misfit(cast, Machine(None, device=room)) == ""
    problem = misfit(cast, Machine(None, device=room - 1))
    assert problem.startswith(f"GPU: {format_bytes(room)} needed")
    assert problem.endswith("; NCCL, 924.84 MB)")
    for alone in (lt_zero.estimate(1e9, config, world=1), lt_zero.estimate(1e9, config, world=8, device="cpu")):
        assert alone.communicators == 0
        assert "NCCL" not in str(alone)


def test_the_error_says_what_is_missing() -> None:
    with pytest.raises(NotEnoughMemory, match="4 rank") as caught:
        check_host_memory({"moments": 8 * GB, "gradients": 4 * GB}, Available(5 * GB, "a test"), ranks=4, remedy="Do.")
    text = str(caught.value)
    for words in ("moments", "8.00 GB", "gradients", "4.00 GB", "12.00 GB", "a test", "5.00 GB", "7.00 GB", "Do."):
        assert words in text
    again = pickle.loads(pickle.dumps(caught.value))
    assert (str(again), again.need, again.have) == (text, caught.value.need, 5 * GB)
    check_host_memory({"moments": 5 * GB}, Available(5 * GB, ""))


# ---- before anything is allocated ------------------------------------------------------------------------------


def _refused(poor: int) -> None:
    """Rank ``poor`` finds too little; every rank is told, and no rank has made a bucket."""
    model = Net()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    patch = pytest.MonkeyPatch()
    free = 1000 if dist.get_rank() == poor else 10**12
    patch.setattr(check, "host_memory", lambda *_: Available(free, "a small test machine"))
    made: list[Any] = []
    patch.setattr(Bucket, "__init__", lambda *_: made.append(1))
    try:
        with pytest.raises(NotEnoughMemory) as caught:
            lt_zero.shard(model, ZeroConfig.of({"zero_optimization": {"stage": 0}, "bf16": {"enabled": True}}))
    finally:
        patch.undo()
    text = str(caught.value)
    for words in ("2 rank(s)", "a small test machine", "weights", "gradients", "master weights", "kB", "estimate"):
        assert words in text, (words, text)
    # Both ranks' weights and fp32 master weights: 2 and 4 bytes for each of at least 2163 parameters.
    assert caught.value.need["weights"] + caught.value.need["master weights"] >= 2 * 6 * 2163
    assert not made
    assert all(value.equal(before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("poor", [0, 1])
def test_shard_refuses_on_all_ranks(pool: Pool, poor: int) -> None:
    pool.run(2, _refused, poor)


class Before:
    """A run of before, which refers to itself as a Trainer and its strategy do."""

    def __init__(self) -> None:
        self.me = self


def _after_another_run() -> None:
    with gc_disabled(), pytest.MonkeyPatch.context() as patch:
        before = weakref.ref(Before())
        free = {True: 1000, False: 10**12}  # by whether it is alive, on rank 1
        alive = lambda: dist.get_rank() == 1 and before() is not None  # noqa: E731
        patch.setattr(check, "host_memory", lambda *_: Available(free[alive()], "a test"))
        patch.setattr(world, "_joined", set())  # after runs of other tests on one rank, that rank would collect earlier
        assert before() is not None
        lt_zero.shard(Net(), ZeroConfig(stage=2))
        assert before() is None


def test_garbage_of_another_run_is_collected_first(pool: Pool) -> None:
    pool.run(2, _after_another_run)


def fit(config: dict[str, Any], optimizer: str = "adamw") -> None:
    strategy = ZeroStrategy(config=config)
    trainer = pl.Trainer(**{**QUIET, "strategy": strategy, "devices": 1, "max_steps": 1})
    trainer.fit(GPT(optimizer=optimizer))


def _limited() -> None:
    zero = {"zero_optimization": {"stage": 2}}
    with pytest.raises(NotEnoughMemory, match="max_cpu_gb=1e-05") as caught:
        fit({**zero, "max_cpu_gb": 1e-5})
    assert "What would fit" in str(caught.value) or "No setting fits" in str(caught.value)
    # 2200 parameters: 4 + 4 bytes each and reduce buffers suffice for SGD; Adam has 8 more.
    scarce: list[bool] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(check, "return_large_blocks", lambda: scarce.append(True))
        enough = next(n for n in range(20, 200) if _passes(zero, n * 1e-6, "sgd"))
        assert scarce, "a fragmented heap would not fit"
        scarce.clear()
        assert _passes(zero, enough * 1e-6 + 4e-9 * 3000, "sgd")
        assert not scarce
    with pytest.raises(NotEnoughMemory, match="moments"):
        fit({**zero, "max_cpu_gb": (enough + 1) * 1e-6})


def _passes(zero: dict[str, Any], gb: float, optimizer: str) -> bool:
    try:
        fit({**zero, "max_cpu_gb": gb}, optimizer)
    except NotEnoughMemory:
        return False
    return True


def test_the_trainer_refuses(pool: Pool) -> None:
    pool.run(1, _limited)


def test_a_check_that_fails_without_the_planner_suggests_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused() -> str:
        with pytest.raises(NotEnoughMemory) as caught:
            lt_zero.shard(Net(), {"max_cpu_gb": 1e-6})
        return str(caught.value)

    told = refused()
    assert "No setting fits" in told
    monkeypatch.setitem(sys.modules, "lt_zero.planning.estimate", None)
    assert refused() == re.sub(r"No setting fits.*(?=LT_ZERO_MEMORY_CHECK)", "", told)


# ---- which setting fits ----------------------------------------------------------------------------------------

MODEL = Sizes(7_500_000_000, 200_000_000)


@pytest.mark.parametrize(
    ("gpu", "host", "nvme", "want"),
    [
        (200, 500, 0, "stage 0"),
        (40, 500, 0, "stage 1"),
        (20, 500, 0, "stage 3"),
        (12, 500, 0, "stage 3, offload_optimizer: cpu"),
        (12, 100, 500, "stage 3, offload_optimizer: nvme"),
        (12, 100, 0, None),
    ],
)
def test_the_fastest_that_fits(gpu: float, host: float, nvme: float, want: str | None) -> None:
    if want is not None and "offload" in want:
        skip_without("offload")
    machine = Machine(int(host * GB), int(gpu * GB), int(nvme * GB), ranks=8)
    found = cheapest(MODEL, machine, precision="bf16-mixed")
    assert (str(found.setting) if found.setting else None) == want
    order = [str(setting) for setting in settings()]
    tried = [str(setting) for setting, _ in found.skipped]
    assert tried == order[: len(tried)]
    assert all("needed" in problem and "there" in problem for _, problem in found.skipped)


@needs("offload")
def test_the_ladder() -> None:
    rungs = [(s.stage, *s.places) for s in settings()]
    assert rungs[:4] == [(0, "-", "-"), (1, "-", "-"), (2, "-", "-"), (3, "-", "-")]
    assert rungs[-1] == (3, "nvme", "nvme")
    assert not [s for s in settings("cpu") if "cpu" in s.places]
    kept = ZeroConfig.of(
        {"zero_optimization": {"stage": 1, "reduce_bucket_size": 1000}, "gradient_allreduce_op": "sum"}
    )
    for setting in settings():
        config = setting.of(kept)
        assert config.zero_optimization.stage == setting.stage
        assert config.zero_optimization.reduce_bucket_size == 1000
        assert config.gradient_allreduce_op == "sum"


# ---- the command -----------------------------------------------------------------------------------------------


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["estimate", *arguments], env={"COLUMNS": "120"})
    return result.exit_code, result.output


@needs("offload")
def test_command_table(tmp_path: Path) -> None:
    code, text = run("--params", "7.5e9", "--largest", "2e8", "--world", "64", "--per-node", "8")
    assert code == 0
    assert "7,500,000,000 parameters, 64 rank(s), 8 per node" in text
    assert text.count("nvme") >= 4
    config = tmp_path / "ds.json"
    config.write_text(json.dumps({"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}}))
    code, text = run("--params", "1e9", "--world", "4", "--config", str(config), "--optimizer", "8")
    assert code == 0
    assert "Stage 2 as configured" in text
    assert "master weights" in text
    yaml = tmp_path / "ds.yaml"
    yaml.write_text("zero_optimization:\n  stage: 3\n")
    assert "Stage 3 as configured" in run("--params", "1e9", "--config", str(yaml))[1]


def test_command_fit() -> None:
    code, text = run("--params", "7e9", "--world", "8", "--fit", "--gpu-gb", "40", "--cpu-gb", "500")
    assert code == 0
    assert "does not fit: stage 0" in text
    assert "fits: stage 3" in text
    assert run("--params", "7e9", "--fit", "--gpu-gb", "1", "--cpu-gb", "1")[0] == 1


def test_a_gpu_is_enough_for_a_fit() -> None:
    code, text = run("--params", "7B", "--world", "8", "--gpu-gb", "80", "--fit")
    assert code == 0, text
    assert "fits: stage 1" in text
    assert "--cpu-gb" in text


def test_the_command_says_what_else_a_process_takes() -> None:
    text = " ".join(run("--params", "350M", "--device", "cpu", "--world", "2")[1].split())
    assert re.search(r"resident memory \(RSS\) of a rank is higher, by [\d.]+ [MG]B of Python and libraries", text)
    assert "about 1.4 GB of gaps" in text
    assert "RSS" not in run("--params", "350M", "--world", "2")[1]


@needs("offload")
@pytest.mark.parametrize("width", [40, 80, 200])
def test_a_table_is_never_cut(width: int) -> None:
    console = Console(file=io.StringIO(), width=width)
    settings_table(10**8, None, 16, stage=3, console=console)
    names = Table("module", "elements")
    names.columns[0].overflow = "fold"
    names.add_row("base_model.model.language_model.layers.0", "123,456,789")
    show(names, console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "…" not in text
    (row,) = [line for line in text.splitlines() if line.split()[:4] == ["3", "*", "nvme", "nvme"]]
    assert len(re.findall(r"[\d.]+ [MG]B", row)) == 6
    folded = [line.split("│")[1].strip() for line in text.splitlines() if line.startswith("│")]
    assert "".join(folded) == "base_model.model.language_model.layers.0"
    assert (len(folded) > 1) == (width == 40)
    assert "123,456,789" in text


def test_command_module() -> None:
    code, text = run("--module", "tests.support.models:Net", "--stage", "3", "--device", "cpu")
    assert code == 0
    assert "2,163 parameters" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "--params"),
        (("--module", "tests.support.models"), "pkg.mod:function"),
        (("--module", "tests.support.models:tokens"), "--module"),
        (("--params", "1e9", "--config", "absent.yaml"), "absent.yaml"),
        (("--params", "1e9", "--fit"), "--gpu-gb"),
        (("--params", "1e9", "--fit", "--device", "cpu"), "--cpu-gb"),
        (("--params", "7X"), "7B"),
        (("--params", "nan"), "7B"),
        (("--params", "1M", "--largest", "2M"), "largest"),
        (("--params", "1e9", "--optimizer", "adma"), "adma"),
    ],
)
def test_command_errors(arguments: tuple[str, ...], message: str) -> None:
    code, text = run(*arguments)
    assert code == 2
    assert message in text
