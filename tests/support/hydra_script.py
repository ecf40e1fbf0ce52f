"""The demo, with every process noting the configuration that it got. Its ranks and jobs run this file again."""

from __future__ import annotations

import functools
import os
import sys
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from lt_zero import sweep
from tests.support.paths import ROOT

DEMO = ROOT / "examples/train_gpt.py"
own_process = sweep.own_process


def noting(task: sweep.Task) -> sweep.Task:
    @functools.wraps(task)
    def noted(config: DictConfig) -> Any:
        folder = Path(HydraConfig.get().runtime.output_dir)
        rank = int(os.environ.get("LOCAL_RANK", "0"))
        (folder / f"rank-{rank}.yaml").write_text(OmegaConf.to_yaml(config, resolve=True))
        return task(config)

    return own_process(noted)


if __name__ == "__main__":
    sweep.own_process = noting
    sys.path.insert(0, str(DEMO.parent))
    names = {"__name__": "__main__", "__file__": str(DEMO)}
    exec(compile(DEMO.read_text(encoding="utf-8"), DEMO, "exec"), names)  # not runpy: ranks are to run this file
