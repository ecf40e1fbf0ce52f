"""Which tasks a launcher has started, a group of all of them, and no rank that trains alone."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import lightning.pytorch as pl
import pytest
import torch.distributed as dist
from lightning.fabric.plugins.environments import LightningEnvironment
from torch import nn

import lt_zero
from lt_zero import FabricZeroStrategy, ZeroStrategy
from lt_zero.common.ports import free_port
from lt_zero.core.health.launchers import first_node, launched_tasks, unjoined_tasks
from tests.support.launchers import environment
from tests.support.paths import SUPPORT
from tests.support.pool import Pool

SLURM = {
    "SLURM_JOB_ID": "1234567",
    "SLURM_JOB_NAME": "train",
    "SLURM_STEP_ID": "2",
    "SLURM_NTASKS": "2",
    "SLURM_NTASKS_PER_NODE": "2",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "1",
    "SLURM_NODELIST": "gpu[07-09,12],cpu1",
}
OPEN_MPI = {f"OMPI_COMM_WORLD_{name}": value for name, value in zip(("RANK", "SIZE", "LOCAL_RANK"), "121", strict=True)}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0"}
TRAIN_JOB = {"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_NPROC_PER_NODE": "1", "PET_MASTER_ADDR": "job-node-0-0.job"}
SAGEMAKER = {"SM_HOSTS": '["algo-1", "algo-2"]', "SM_CURRENT_HOST": "algo-2", "SM_NUM_GPUS": "1"}
PYTORCH_JOB = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "job-master-0", "MASTER_PORT": "23456"}
TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "a", "MASTER_PORT": "7"}


@pytest.mark.parametrize(
    ("variables", "wanted"),
    [
        ({}, None),
        (TORCHRUN, ("RANK", 3, 4, 1, "a", 7)),
        ({**SLURM, **TORCHRUN}, ("RANK", 3, 4, 1, "a", 7)),
        (SLURM, ("SLURM", 1, 2, 1, "gpu07", 15000 + (1234567 + 14) % 10000)),
        ({**SLURM, "MASTER_ADDR": "b", "MASTER_PORT": "9"}, ("SLURM", 1, 2, 1, "b", 9)),
        ({**SLURM, "SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_NODELIST": "n1"}, ("SLURM", 1, 8, 1, "n1", 19581)),
        ({**SLURM, "SLURM_JOB_NAME": "bash"}, None),
        ({**SLURM, "SLURM_JOB_NAME": "interactive"}, None),
        ({**SLURM, "SLURM_PTY_PORT": "40000"}, None),
        ({**SLURM, "SLURM_STEP_ID": "4294967290"}, None),  # the shell of salloc
        ({k: v for k, v in SLURM.items() if k != "SLURM_STEP_ID"}, None),  # a batch script, or the shell of salloc
        (OPEN_MPI, ("Open MPI", 1, 2, 1, None, 29500)),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, ("Open MPI", 1, 2, 1, "127.0.0.1", 29500)),
        ({**SLURM, **OPEN_MPI, "MASTER_ADDR": "b"}, ("SLURM", 1, 2, 1, "b", 19581)),
        ({**SLURM, **OPEN_MPI, "SLURM_NTASKS": "1", "MASTER_ADDR": "b"}, ("Open MPI", 1, 2, 1, "b", 29500)),
        (MPICH, ("PMI (MPICH, Intel MPI)", 1, 2, 0, None, 29500)),
        ({**SLURM, "PMI_RANK": "1", "PMI_SIZE": "2"}, ("SLURM", 1, 2, 1, "gpu07", 19581)),  # srun --mpi=pmi2
        ({**SLURM, **MPICH, "PMI_SIZE": "4"}, ("PMI (MPICH, Intel MPI)", 1, 4, 0, None, 29500)),  # mpirun in a step
    ],
)
def test_tasks(variables: dict[str, str], wanted: tuple[Any, ...] | None) -> None:
    assert launched_tasks(variables) == wanted


def test_one_job_has_one_port_and_jobs_differ() -> None:
    ports = {job: launched_tasks({**OPEN_MPI, "PMIX_NAMESPACE": job}).port for job in ("a@1", "b@1")}  # type: ignore[union-attr]
    assert len(set(ports.values())) == 2
    assert all(15000 <= port < 25000 for port in ports.values())


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("a", "a"), ("a,b", "a"), ("n[5-9]", "n5"), ("n[05,7-9]x[1-2],y", "n05x1"), ("h0 h1", "h0"), ("n[3]", "n3")],
)
def test_first_node(nodes: str, first: str) -> None:
    assert first_node(nodes) == first


@pytest.mark.parametrize(
    ("variables", "match"),
    [
        ({"RANK": "1"}, "WORLD_SIZE is not"),
        ({**SLURM, "SLURM_PROCID": "x"}, "SLURM_PROCID='x'"),
        ({**TORCHRUN, "RANK": "4"}, "RANK=4 and WORLD_SIZE=4"),
        ({**TORCHRUN, "RANK": "-1"}, "RANK=-1 and WORLD_SIZE=4"),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "0"}, "OMPI_COMM_WORLD_RANK=1 and OMPI_COMM_WORLD_SIZE=0"),
    ],
)
def test_variables_that_cannot_be(variables: dict[str, str], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        launched_tasks(variables)


@pytest.mark.parametrize("hosts", ["algo-1", "[]", "2", '{"a": 1}', "[1, 2]", "[" * 100_000])
def test_a_list_of_hosts_that_cannot_be(hosts: str) -> None:
    with pytest.raises(ValueError, match="SM_HOSTS=.*as a JSON list"):
        unjoined_tasks({**SAGEMAKER, "SM_HOSTS": hosts})


# ---- a group of all tasks --------------------------------------------------------------------------------------------


def _joins(kind: str, port: int, file: str) -> tuple[int, int, str]:
    """The rank, the ranks and LOCAL_RANK in the group that ``init_distributed`` makes."""
    rank, world = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    numbers = (rank, world, rank, world)
    options: dict[str, Any] = {}
    if kind == "SLURM":
        here = {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank), "SLURM_NODELIST": "localhost"}
        os.environ.update({**SLURM, **here, "MASTER_PORT": str(port)})
    elif kind == "Open MPI":
        names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
        os.environ.update({f"OMPI_COMM_WORLD_{n}": str(v) for n, v in zip(names, numbers, strict=True)})
        options = {"distributed_port": port}
    elif kind == "MPICH":
        names = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
        os.environ.update({n: str(v) for n, v in zip(names, numbers, strict=True)})
        options = {"distributed_port": port}
    elif kind == "file":
        options = {"init_method": f"file://{file}", "rank": rank, "world_size": world}
    else:
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        options = {"rank": rank, "world_size": world}
    lt_zero.init_distributed("gloo", **options)
    lt_zero.init_distributed("gloo")  # there is one
    dist.barrier()
    engine, *_ = lt_zero.initialize(model=nn.Linear(2, 2), config={"optimizer": {"type": "SGD", "params": {"lr": 0.1}}})
    return engine.global_rank, engine.world_size, os.environ.get("LOCAL_RANK", "")


@pytest.mark.parametrize("kind", ["SLURM", "Open MPI", "MPICH", "file", "numbers"])
def test_init_distributed_makes_a_group_of_all(pool: Pool, tmp_path: Path, kind: str) -> None:
    found = pool.run(2, _joins, kind, free_port(), str(tmp_path / "store"))
    known = kind not in ("file", "numbers")
    assert found == [(0, 2, "0" if known else ""), (1, 2, "1" if known else "")]


# ---- nobody trains alone ---------------------------------------------------------------------------------------------


def _loop() -> None:
    lt_zero.initialize(model=nn.Linear(2, 2), config={}, dist_init_required=False)


def _user_group() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        lt_zero.shard(nn.Linear(2, 2), {})
    finally:
        dist.destroy_process_group()


def _user_group_first() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        lt_zero.init_distributed()
    finally:
        dist.destroy_process_group()


def _trainer() -> None:
    strategy = ZeroStrategy(cluster_environment=LightningEnvironment())
    pl.Trainer(accelerator="cpu", devices=1, strategy=strategy, logger=False)


def _fabric() -> None:
    L.Fabric(accelerator="cpu", devices=1, strategy=FabricZeroStrategy(), plugins=[LightningEnvironment()])


@pytest.mark.parametrize("variables", [SLURM, OPEN_MPI, MPICH], ids=["SLURM", "Open MPI", "MPICH"])
@pytest.mark.parametrize("start", [_loop, _user_group, _user_group_first, _trainer, _fabric])
def test_a_task_of_several_does_not_train_alone(
    monkeypatch: pytest.MonkeyPatch, start: Any, variables: dict[str, str]
) -> None:
    # With it Lightning takes this process for one that a launcher has started.
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RuntimeError, match=r"has started 2 tasks, of which this is number 1.*LT_ZERO_ALONE=1"):
        start()
    monkeypatch.setenv("LT_ZERO_ALONE", "1")
    start()


@pytest.mark.parametrize(
    ("variables", "starts", "remedy"),
    [
        (TRAIN_JOB, [_loop, _user_group, _trainer, _fabric], "torchrun train.py"),
        ({**TRAIN_JOB, "PET_NNODES": "1:2"}, [_trainer], "torchrun train.py"),
        (SAGEMAKER, [_loop, _user_group, _trainer, _fabric], "'torch_distributed'"),
        (PYTORCH_JOB, [_trainer, _fabric], r"KubeflowEnvironment\(\)"),
    ],
    ids=["TrainJob", "elastic", "SageMaker", "PyTorchJob"],
)
def test_a_host_of_several_does_not_train_alone(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], starts: list[Any], remedy: str
) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    for start in starts:
        with pytest.raises(RuntimeError, match=rf"2 tasks, of which this is number 1.*{remedy}.*LT_ZERO_ALONE=1"):
            start()
    for name in ("NODE_RANK", "LT_ZERO_ALONE"):  # Lightning is told which node this is, or nobody joins
        with monkeypatch.context() as told:
            told.setenv(name, "1")
            _trainer()


def test_a_local_rank_that_is_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    for value in ("", "nan", "1.5"):
        monkeypatch.setenv("LOCAL_RANK", value)
        with pytest.raises(ValueError, match=f"LOCAL_RANK='{value}'"):
            lt_zero.initialize(model=nn.Linear(2, 2), config={})
    monkeypatch.setenv("LOCAL_RANK", "-1")  # of scripts without a launcher
    assert lt_zero.initialize(model=nn.Linear(2, 2), config={})[0].local_rank == 0


def test_a_store_that_nobody_serves_is_rank_0s(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")  # it is put back
        monkeypatch.delenv(name)
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))  # and does not listen
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(bound.getsockname()[1]))
        with pytest.raises(RuntimeError, match=rf"rank 0, .*127.0.0.1:{os.environ['MASTER_PORT']}.*has ended, or"):
            lt_zero.init_distributed("gloo", timedelta(seconds=1), rank=1, world_size=2)


def _starts_beside_a_listener() -> list[int]:
    """The world sizes of a Trainer and Fabric that have one rank, where the port that they are told is taken."""
    found = []
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", free_port()))
        taken.listen()
        os.environ["MASTER_PORT"] = str(taken.getsockname()[1])
        for made in (
            L.Trainer(strategy=ZeroStrategy(stage=3), accelerator="cpu", devices=1, logger=False),
            L.Fabric(strategy=FabricZeroStrategy(stage=3), accelerator="cpu", devices=1),
        ):
            dist.destroy_process_group()
            made.strategy.setup_environment()
            found.append(dist.get_world_size())
    return found


def test_a_run_of_one_rank_needs_no_port(pool: Pool) -> None:
    """Lightning looks for a free port, and another program may take it before rank 0 listens there."""
    assert pool.run(1, _starts_beside_a_listener) == [[1, 1]]


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"rank": 0}, "pass both"),
        ({"init_method": "file:///tmp/never"}, "needs rank=... and world_size"),
        ({"rank": 0, "world_size": 2}, "not on which host rank 0 is"),
    ],
)
def test_arguments_that_cannot_be(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        lt_zero.init_distributed("gloo", **options)
    with pytest.raises(TypeError):
        lt_zero.init_distributed(backend="gloo")  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("argument", "value", "error", "remedy"),
    [
        ("timeout", "30", TypeError, "pass datetime.timedelta"),
        ("timeout", 30, TypeError, "pass datetime.timedelta"),
        ("timeout", timedelta(0), ValueError, "Pass a longer one"),
        ("backend", "foo", ValueError, "gloo"),
        ("backend", 1, ValueError, "gloo"),
        ("start_method", "notebook", ValueError, "fork"),
    ],
)
def test_wrong_options_are_refused_where_they_are_passed(
    argument: str, value: Any, error: type[Exception], remedy: str
) -> None:
    calls: dict[Any, str] = {ZeroStrategy: "process_group_backend", FabricZeroStrategy: "process_group_backend"}
    if argument != "start_method":
        calls[lt_zero.init_distributed] = "dist_backend"
    for call, backend in calls.items():
        name = backend if argument == "backend" else argument
        with pytest.raises(error, match=rf"{call.__name__}\({name}=.*{re.escape(repr(value))}.*{remedy}"):
            call(**{name: value})


def test_backends_of_torch_are_taken() -> None:
    for backend in (None, "gloo", "NCCL", "cpu:gloo,cuda:nccl", "mpi"):
        assert ZeroStrategy(timeout=None, process_group_backend=backend).process_group_backend == backend


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["SLURM", "Open MPI"])
def test_a_script_of_two_tasks_is_one_run(kind: str, tmp_path: Path) -> None:
    """``srun -n 2 python train.py`` and ``mpirun -n 2 python train.py``, whose script knows nothing of launchers."""
    port, processes = str(free_port()), []
    for rank in range(2):
        numbers = {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank), "SLURM_NODELIST": "localhost"}
        variables = {**SLURM, **numbers}
        if kind == "Open MPI":
            names = {"RANK": rank, "SIZE": 2, "LOCAL_RANK": rank, "LOCAL_SIZE": 2}
            variables = {f"OMPI_COMM_WORLD_{name}": str(value) for name, value in names.items()}
        env = environment(**variables, MASTER_PORT=port)
        command = [sys.executable, str(SUPPORT / "loop_script.py"), str(tmp_path)]
        processes.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True))
    printed = [process.communicate(timeout=110)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], printed
    assert sorted(line for text in printed for line in text.splitlines() if line.startswith("RESULT")) == [
        "RESULT 0 of 2",
        "RESULT 1 of 2",
    ]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["srun", "srun torchrun", "TrainJob", "PyTorchJob", "SageMaker"])
def test_two_hosts_are_one_run(kind: str) -> None:
    """The variables and commands of docs/clusters.md."""
    port, processes = str(free_port()), []
    for rank in range(2):
        node = str(rank)
        slurm = {
            **SLURM,
            "SLURM_PROCID": node,
            "SLURM_NODEID": node,
            "SLURM_LOCALID": "0",
            "SLURM_NODELIST": "127.0.0.1",
        }
        slurm = {**slurm, "SLURM_NTASKS_PER_NODE": "1", "SLURM_NNODES": "2"}
        pet = {"PET_NNODES": "2", "PET_NODE_RANK": node, "PET_NPROC_PER_NODE": "1"}
        pet = {**pet, "PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": port}
        master = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        sagemaker = {**SAGEMAKER, "SM_CURRENT_HOST": f"algo-{rank + 1}"}
        options = ["--nnodes", "2", "--nproc_per_node", "1", "--node_rank", node]
        options += ["--master_addr", "127.0.0.1", "--master_port", port]
        torchrun, script = ["-m", "torch.distributed.run"], [str(SUPPORT / "cluster_script.py")]
        variables, arguments = {
            "srun": ({**slurm, **master}, script),
            "srun torchrun": (slurm, [*torchrun, *options, *script]),
            "TrainJob": (pet, [*torchrun, *script]),
            "PyTorchJob": ({**master, "RANK": node, "WORLD_SIZE": "2"}, [*script, "kubeflow"]),
            "SageMaker": (sagemaker, [*torchrun, *options, *script]),
        }[kind]
        env = environment(**variables)
        processes.append(subprocess.Popen([sys.executable, *arguments], env=env, stdout=subprocess.PIPE, text=True))
    printed = [process.communicate(timeout=110)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], printed
    found = sorted(line for text in printed for line in text.splitlines() if line.startswith("RESULT"))
    assert found == ["RESULT 0 of 2 on 0", "RESULT 1 of 2 on 1"]
