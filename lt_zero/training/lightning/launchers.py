"""The choice how ranks are started: by a script that runs once more for each, as processes, or not at all."""

from __future__ import annotations

from typing import Any, Literal

from lt_zero.common.compat import is_interactive
from lt_zero.common.errors import ConfigError
from lt_zero.core.health.launchers import refuse_own_launcher


def choose_start(
    strategy: Any, stage: int, start_method: Literal["popen", "spawn", "fork", "forkserver"]
) -> Literal["popen", "spawn", "fork", "forkserver"] | None:
    """Choose how the ranks of a strategy are started in this process; None: all are there, nothing has to be started.

    Args:
        strategy: of a Trainer or Fabric, which has connected its devices and its cluster environment.
        stage: of ZeRO, for the name of a strategy in the error.
        start_method: that the user has chosen; "popen" is the default.

    Raises:
        ConfigError: the process is interactive, and its ranks cannot be forked without further thought.
        RuntimeError: a launcher has started several tasks that Lightning does not see.
    """
    external = strategy.cluster_environment.creates_processes_externally
    if not external:
        refuse_own_launcher()
    if start_method != "popen" or not is_interactive():
        return start_method
    if external or strategy.num_processes * strategy.num_nodes == 1:
        return None
    if strategy.num_nodes == 1 and strategy.root_device.type == "cpu":
        return "fork"
    name, device = f"zero_{stage}_notebook", strategy.root_device.type
    asked = f"{strategy.num_processes} ranks on {device}"
    if strategy.num_nodes > 1:
        text = f"{strategy.num_nodes} nodes cannot be started from it. Run a script on each node"
    else:
        text = (
            f'it can only fork {asked}. Write strategy="{name}" (or start_method="fork"), and use the {device} device '
            "in no cell before that, also not by moving a tensor to it; or write devices=1; or run a script"
        )
    raise ConfigError.about(
        "start_method",
        f"start_method='popen', the default, runs the script again for each rank, and this process is interactive (a "
        f"notebook, or a Python prompt): {text}.",
    )
