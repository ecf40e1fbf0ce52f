"""Place where the ranks of a run meet, as Lightning's cluster environments tell it."""

from __future__ import annotations

from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment

from lt_zero.core.health.launchers import Tasks, launched_tasks


def place_of(environment: ClusterEnvironment | None, rank: int, world: int) -> Tasks:
    """This rank, and where rank 0 serves the store of all ranks."""
    if environment is None or world == 1:
        return Tasks("Lightning", rank, world)
    return Tasks("Lightning", rank, world, None, environment.main_address, environment.main_port)


def launched_place() -> Tasks | None:
    """``place_of`` before Lightning has made an environment; None if the launcher does not tell."""
    tasks = launched_tasks()
    if tasks is not None and tasks.launcher != "SLURM":
        return tasks
    if not SLURMEnvironment.detect():
        return tasks
    environment = SLURMEnvironment()
    return place_of(environment, environment.global_rank(), environment.world_size())
