"""The rank and size that a launcher has given to this process: torchrun, ``mpirun``, ``srun``.

Note [Ranks that train alone]
    A process that does not see its launcher trains by itself, and so do all of its peers: each is rank 0 of one, and
    they write the same files. So the variables of every common launcher are read, and a group with fewer ranks than
    its launcher has started tasks is an error (``refuse_alone``). ``LT_ZERO_ALONE=1`` says that each task is a run.
    A shell in an allocation of SLURM has the allocation's variables although only one process runs: only ``srun``
    gives a process a number of its step, shells (``--pty``, job names ``bash`` and ``interactive``) do not count.
    ``srun --mpi=pmi2`` sets the variables of MPI, too, which do not tell where rank 0 is: SLURM's do.

    Kubernetes and SageMaker start one process on each of several hosts and leave the rest to torchrun. Without it each
    host would train by itself. ``NODE_RANK`` tells Lightning which host a process is on.
"""

from __future__ import annotations

import json
import os
import re
import zlib
from collections.abc import Mapping
from typing import NamedTuple

from lt_zero.common.variables import switched

_MPI = (  # variables of rank, size, local rank, local size
    (
        "Open MPI",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        ("OMPI_COMM_WORLD_LOCAL_RANK",),
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    (
        "MVAPICH",
        "MV2_COMM_WORLD_RANK",
        "MV2_COMM_WORLD_SIZE",
        ("MV2_COMM_WORLD_LOCAL_RANK",),
        "MV2_COMM_WORLD_LOCAL_SIZE",
    ),
    ("PMI (MPICH, Intel MPI)", "PMI_RANK", "PMI_SIZE", ("MPI_LOCALRANKID", "PMI_LOCAL_RANK"), "MPI_LOCALNRANKS"),
)
_MPI_JOBS = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "PMI_JOBID", "PBS_JOBID")  # tell jobs of one host apart
_SPECIAL_STEP = 0xFFFFFFF0  # steps of SLURM from here on are shells, batch scripts and others
_SHELLS = ("bash", "interactive")  # job names
_PORT = 29500  # torch's
_KUBEFLOW = "A job of Kubeflow"
_SAGEMAKER = "SageMaker"
_NUMBERED = "Who has set RANK and WORLD_SIZE"
_REMEDIES = {  # of those whose tasks no variable makes ranks
    _KUBEFLOW: "Start the script with torchrun, which reads the job's variables PET_*: torchrun train.py",
    _SAGEMAKER: "Start the job with distribution={'torch_distributed': {'enabled': True}}",
    _NUMBERED: "Start with torchrun (--nnodes=$WORLD_SIZE --node-rank=$RANK); or, if each task has one device, pass "
    "plugins=[KubeflowEnvironment()], devices=1 and the number of tasks as num_nodes; or set NODE_RANK, or unset RANK",
}


class Tasks(NamedTuple):
    """A launcher's tasks, and which of them this process is.

    ``local_rank``: on its host; None: unknown. ``address``: of rank 0's host; None: unknown.
    """

    launcher: str
    rank: int
    world: int
    local_rank: int | None = None
    address: str | None = None
    port: int = _PORT


def launched_tasks(variables: Mapping[str, str] | None = None, mpi: bool = True) -> Tasks | None:
    """The tasks of the launcher that has started this process; None if none has.

    Args:
        variables: of the environment; default: of this process.
        mpi: whether the launchers of MPI count.

    Raises:
        ValueError: a variable is no number, or there is a rank without a number of ranks, or beyond it.
    """
    found = os.environ if variables is None else variables
    if "RANK" in found:
        if "WORLD_SIZE" not in found:
            raise ValueError(f"RANK={found['RANK']} is set, and WORLD_SIZE is not. Set both, or none (see torchrun).")
        local = _number(found, "LOCAL_RANK") if "LOCAL_RANK" in found else None
        port = _number(found, "MASTER_PORT") if "MASTER_PORT" in found else _PORT
        return Tasks("RANK", *_place(found, "RANK", "WORLD_SIZE"), local, found.get("MASTER_ADDR"), port)
    return started_tasks(found, mpi)


def started_tasks(variables: Mapping[str, str] | None = None, mpi: bool = True) -> Tasks | None:
    """``launched_tasks``, as ``mpirun`` or ``srun`` tell it, whatever ``RANK`` says."""
    found = os.environ if variables is None else variables
    tasks, slurm = _of_mpi(found) if mpi else None, _of_slurm(found)
    if tasks is None or (slurm is not None and slurm[1:3] == tasks[1:3]):  # srun --mpi=pmi2 sets both
        tasks = slurm
    if tasks is None:
        return None
    address, port = found.get("MASTER_ADDR", tasks.address), tasks.port
    return tasks._replace(address=address, port=_number(found, "MASTER_PORT") if "MASTER_PORT" in found else port)


def refuse_alone(world: int) -> None:
    """Raise if this process is of a group of ``world`` ranks, and its launcher has started more tasks.

    See Note [Ranks that train alone].

    Raises:
        RuntimeError: it has.
    """
    tasks = started_tasks() or _of_hosts(os.environ)
    if tasks is None or tasks.world <= world or _may_be_alone():
        return
    remedy = "Call lt_zero.init_distributed() first, or make the group of all tasks"
    raise RuntimeError(
        f"{tasks.launcher} has started {tasks.world} tasks, of which this is number {tasks.rank}, but its process "
        f"group has {world} rank{'' if world == 1 else 's'}: they would train apart from each other and write the same "
        f"files. {_REMEDIES.get(tasks.launcher, remedy)}; LT_ZERO_ALONE=1 lets each task be a run of its own."
    )


def refuse_own_launcher() -> None:
    """Raise if this process is about to start the ranks of a run, and a launcher has started several tasks.

    Raises:
        RuntimeError: it has.
    """
    tasks = started_tasks() or unjoined_tasks()
    if tasks is None or tasks.world == 1 or _may_be_alone():
        return
    remedy = "Install mpi4py, by which Lightning sees them, or start with torchrun"
    if tasks.launcher == "SLURM":
        remedy = "Remove plugins=[LightningEnvironment()], so that Lightning sees them"
    raise RuntimeError(
        f"{tasks.launcher} has started {tasks.world} tasks, of which this is number {tasks.rank}, and Lightning does "
        "not know: each would start all ranks of a run of its own, and write the same files. "
        f"{_REMEDIES.get(tasks.launcher, remedy)}; LT_ZERO_ALONE=1 lets each task be a run of its own."
    )


def unjoined_tasks(variables: Mapping[str, str] | None = None) -> Tasks | None:
    """The tasks that variables tell of and that Lightning does not join: it would start a run in each.

    Args:
        variables: of the environment; default: of this process.
    """
    found = os.environ if variables is None else variables
    return _of_hosts(found) or _of_numbers(found)


def remedy_for(tasks: Tasks) -> str:
    """Text that says what joins the tasks that ``unjoined_tasks`` has found to one run."""
    return f"{_REMEDIES[tasks.launcher]}."


def _may_be_alone() -> bool:
    return switched("LT_ZERO_ALONE", False)


def _number(found: Mapping[str, str], name: str) -> int:
    try:
        return int(found[name])
    except ValueError:
        raise ValueError(
            f"{name}={found[name]!r}: a launcher writes a number there. Unset it, or correct it."
        ) from None


def _place(found: Mapping[str, str], rank: str, size: str) -> tuple[int, int]:
    """The rank and the number of ranks in two variables."""
    number, world = _number(found, rank), _number(found, size)
    if not 0 <= number < world:
        raise ValueError(
            f"{rank}={found[rank]} and {size}={found[size]}: ranks are numbered from 0, below their number. Set both "
            "as the launcher does, or unset them."
        )
    return number, world


def local_rank(default: int = 0) -> int:
    """``LOCAL_RANK``, the number of this rank on its host; 0 for -1, which scripts use for "no launcher".

    Raises:
        ValueError: it is no number.
    """
    return max(0, _number(os.environ, "LOCAL_RANK") if "LOCAL_RANK" in os.environ else default)


def _of_mpi(found: Mapping[str, str]) -> Tasks | None:
    for launcher, rank, size, locals_, local_size in _MPI:
        if rank in found and size in found:
            number, world = _place(found, rank, size)
            local = next((_number(found, name) for name in locals_ if name in found), None)
            one_host = local_size in found and _number(found, local_size) == world
            job = next((found[name] for name in _MPI_JOBS if name in found), None)
            port = _PORT if job is None else 15000 + zlib.crc32(job.encode()) % 10000
            return Tasks(launcher, number, world, local, "127.0.0.1" if one_host else None, port)
    return None


def _of_slurm(found: Mapping[str, str]) -> Tasks | None:
    step = found.get("SLURM_STEP_ID", found.get("SLURM_STEPID"))
    if step is None or "SLURM_PROCID" not in found or "SLURM_PTY_PORT" in found:
        return None
    if found.get("SLURM_JOB_NAME") in _SHELLS or not step.isdecimal() or int(step) >= _SPECIAL_STEP:
        return None
    size = next((name for name in ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS") if name in found), None)
    if size is None:
        return None
    nodes = next(
        (found[n] for n in ("SLURM_STEP_NODELIST", "SLURM_NODELIST", "SLURM_JOB_NODELIST") if n in found), None
    )
    job = found.get("SLURM_JOB_ID", "0")
    port = 15000 + (int(job) + 7 * int(step)) % 10000 if job.isdecimal() else _PORT
    local = _number(found, "SLURM_LOCALID") if "SLURM_LOCALID" in found else None
    address = first_node(nodes) if nodes is not None else None
    return Tasks("SLURM", _number(found, "SLURM_PROCID"), _number(found, size), local, address, port)


def _is_told(found: Mapping[str, str]) -> bool:
    """True if variables number this process, or its host, in a way that torchrun or Lightning reads."""
    return any(name in found for name in ("TORCHELASTIC_RUN_ID", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK"))


def _of_hosts(found: Mapping[str, str]) -> Tasks | None:
    """The hosts on each of which Kubernetes or SageMaker has started one process, without torchrun."""
    if _is_told(found):
        return None
    if "PET_NNODES" in found:
        most = found["PET_NNODES"].rpartition(":")[2]  # an elastic job has "least:most"
        rank = found.get("PET_NODE_RANK", found.get("JOB_COMPLETION_INDEX", "0"))
        if most.isdecimal() and rank.isdecimal():
            return Tasks(_KUBEFLOW, int(rank), int(most))
    if "SM_HOSTS" in found:
        hosts = _hosts_of_sagemaker(found["SM_HOSTS"])
        here = found.get("SM_CURRENT_HOST")
        return Tasks(_SAGEMAKER, hosts.index(here) if here in hosts else 0, len(hosts))
    return None


def _hosts_of_sagemaker(text: str) -> list[str]:
    """The names in ``SM_HOSTS``."""
    try:
        hosts = json.loads(text)
    except (ValueError, RecursionError):
        hosts = None
    if isinstance(hosts, list) and hosts and all(isinstance(host, str) for host in hosts):
        return hosts
    raise ValueError(
        f"SM_HOSTS={text[:100]!r}: SageMaker writes the names of its hosts there, as a JSON list. Unset it, or correct "
        "it."
    )


def _of_numbers(found: Mapping[str, str]) -> Tasks | None:
    """The tasks that ``RANK`` and ``WORLD_SIZE`` number, as a PyTorchJob's pods; Lightning does not read ``RANK``."""
    if _is_told(found) or "RANK" not in found or "WORLD_SIZE" not in found:
        return None
    return Tasks(_NUMBERED, *_place(found, "RANK", "WORLD_SIZE"))


def first_node(nodes: str) -> str:
    """The first host of a list of SLURM: ``gpu[07-09,12],cpu1`` -> ``gpu07``."""
    return re.split(r"[,\s]", re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", nodes.strip()), maxsplit=1)[0]
