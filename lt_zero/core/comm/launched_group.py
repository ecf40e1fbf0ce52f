"""The default process group of all tasks that a launcher has started, for loops of one's own."""

from __future__ import annotations

import os
from contextlib import nullcontext
from datetime import timedelta

import torch.distributed as dist

from lt_zero.common import accelerator
from lt_zero.common.arguments import check_group_options
from lt_zero.core.comm.process_groups import begin_restarted, init_alone, joining, own_gpu
from lt_zero.core.health.before_joining import met, watch_start
from lt_zero.core.health.launchers import Tasks, launched_tasks, local_rank, refuse_alone


def init_distributed(
    dist_backend: str | None = None,
    timeout: timedelta | None = None,
    *,
    init_method: str | None = None,
    rank: int = -1,
    world_size: int = -1,
    auto_mpi_discovery: bool = True,
    distributed_port: int | None = None,
    dist_init_required: bool | None = None,
    verbose: bool = True,
    config: object = None,
) -> None:
    """Make the default process group of all tasks that a launcher has started.

    The launcher is torchrun (``RANK``, ``WORLD_SIZE``, ``MASTER_ADDR``), Open MPI, MPICH, Intel MPI or MVAPICH
    (``mpirun``), or ``srun``; their numbers are written to torchrun's variables. A single task of a launcher gets a
    group of its own. No-op if there is a group, and without a launcher.

    Args:
        dist_backend: default: that of the accelerator, such as "nccl"; "gloo" for CPUs.
        timeout: of its collectives; None: torch's default.
        init_method: as for ``torch.distributed.init_process_group``; default: ``MASTER_ADDR`` and ``MASTER_PORT``.
        rank, world_size: instead of the launcher's.
        auto_mpi_discovery: whether the variables of ``mpirun`` count.
        distributed_port: of rank 0's host, if ``MASTER_PORT`` is not set.
        dist_init_required: False: make no group.
        verbose, config: arguments of DeepSpeed's, without effect.

    Raises:
        TypeError: ``timeout`` is no timedelta.
        ValueError: arguments or variables contradict each other, a backend is unknown, or it is not known where rank 0
            is.
        RuntimeError: the group that there is has fewer ranks than the launcher has started tasks; see launchers.py.
    """
    watch_start()
    if (rank < 0) != (world_size < 0):
        raise ValueError(f"init_distributed(rank={rank}, world_size={world_size}): pass both, or none.")
    check_group_options("init_distributed", timeout, dist_backend=dist_backend)
    if dist.is_initialized():
        _check_existing_group(rank, world_size)
        return
    tasks = None
    if dist_init_required is not False:
        tasks = _joining_tasks(rank, world_size, init_method, auto_mpi_discovery)
    if tasks is None:
        if world_size < 0:
            refuse_alone(1)
        return
    if tasks.world == 1 and init_method is None:
        if world_size < 0:
            refuse_alone(1)
        init_alone(dist_backend, timeout)
        return
    tasks = _export(tasks, init_method, distributed_port)
    _join_tasks(tasks, dist_backend, init_method, timeout)
    if world_size < 0:
        refuse_alone(dist.get_world_size())


def _join_tasks(tasks: Tasks, backend: str | None, init_method: str | None, timeout: timedelta | None) -> None:
    """Make the default process group of several tasks. Collective."""
    backend = backend or dist.get_default_backend_for_device(accelerator.default_kind())
    device = accelerator.default_device(own_gpu(local_rank())) if accelerator.is_available() else None
    accelerator.make_current(device)
    bound = device if "nccl" in backend else None  # groups are then split off the default one
    meeting = met(tasks, timeout) if init_method in (None, "env://") else nullcontext()
    with joining(), meeting:
        begin_restarted(backend, timeout, bound)
        if not dist.is_initialized():
            dist.init_process_group(backend, init_method, timeout, tasks.world, tasks.rank, device_id=bound)


def _check_existing_group(rank: int, world_size: int) -> None:
    """Check that the process group that there is has the ranks that were launched, or asked for (-1: none were)."""
    refuse_alone(dist.get_world_size())
    if world_size >= 0 and (rank, world_size) != (dist.get_rank(), dist.get_world_size()):
        raise ValueError(
            f"init_distributed(rank={rank}, world_size={world_size}), but there is a process group already, in which "
            f"this is rank {dist.get_rank()} of {dist.get_world_size()}. Remove one of the two calls."
        )


def _joining_tasks(rank: int, world_size: int, init_method: str | None, mpi: bool) -> Tasks | None:
    """This task among those that join a group; None without a launcher."""
    tasks = launched_tasks(mpi=mpi)
    if world_size >= 0:
        tasks = (tasks or Tasks("", 0, 1))._replace(rank=rank, world=world_size)
    if init_method is not None and tasks is None:
        raise ValueError(f"init_distributed(init_method={init_method!r}) needs rank=... and world_size=..., too.")
    return tasks


def _export(tasks: Tasks, init_method: str | None, port: int | None) -> Tasks:
    """Write torchrun's variables, which scripts and other packages read; returns the tasks that they tell."""
    made = {"RANK": tasks.rank, "WORLD_SIZE": tasks.world}
    if tasks.local_rank is not None:
        made["LOCAL_RANK"] = tasks.local_rank
    elif accelerator.is_available():  # hosts are filled one after the other by default
        made["LOCAL_RANK"] = tasks.rank % accelerator.count()
    if init_method in (None, "env://"):
        address = os.environ.get("MASTER_ADDR", tasks.address)
        if address is None:
            who = tasks.launcher or "init_distributed"
            raise ValueError(
                f"{who} tells of {tasks.world} ranks, and not on which host rank 0 is. Set MASTER_ADDR (and "
                "MASTER_PORT) to the same on all of them: mpirun -x MASTER_ADDR=HOST, or mpiexec -genv MASTER_ADDR "
                "HOST; or pass init_method."
            )
        os.environ["MASTER_ADDR"] = address
        os.environ.setdefault("MASTER_PORT", str(tasks.port if port is None else port))
    os.environ.update({name: str(value) for name, value in made.items()})
    address = os.environ.get("MASTER_ADDR", tasks.address)
    return tasks._replace(address=address, port=int(os.environ.get("MASTER_PORT", tasks.port)))
