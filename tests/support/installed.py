"""Installs a distribution file into an environment of its own, and trains a step with it: ``python -m`` this file.

The environment sees the packages of the interpreter that runs this, but not the package's source tree. A wheel with
kernels has to load them without a compiler; the others compile them.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

STEP = """
import dataclasses
import lightning as L, lt_zero
from lt_zero.kernels.compiler import CSRC, SHIPPED, cached, load, recipe_of
from lt_zero.kernels.library import declare, status
from lightning.pytorch.demos.boring_classes import BoringModel
assert lt_zero.__file__.startswith({folder!r}), lt_zero.__file__
trainer = L.Trainer(strategy=lt_zero.ZeroStrategy(stage=3), accelerator="cpu", devices=1, max_steps=2, logger=False,
                    enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
trainer.fit(BoringModel())
found = status("cpu")
print(found.isa, found.why)
assert trainer.global_step == 2 and found.available, found
assert ("shipped" in found.why) == {shipped}, found
files = set((CSRC / SHIPPED).glob("*.so"))
for kind in ("cpu", "cuda"):
    path = cached(dataclasses.replace(recipe_of(kind), compiler=None), CSRC / SHIPPED)
    if path is not None:
        declare(load(path, kind), kind)
        files.remove(path)
        print("shipped:", path.name)
assert not files, ("libraries of other sources", files)
"""


def main(file: Path) -> None:
    """Install ``file``, and train with it.

    Raises:
        subprocess.CalledProcessError: one of them fails.
    """
    shipped = file.suffix == ".whl" and not file.stem.endswith("-any")
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
        python = Path(folder, "bin", "python")
        install = ["-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", str(file)]
        subprocess.run([sys.executable, *install], check=True)
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        own = Path(folder, "lib", version, "site-packages")
        # Its packages, but not what its own .pth files name, as an editable source tree.
        Path(own, "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
        environment = {**os.environ, "LT_ZERO_CACHE": str(Path(folder, "cache"))}
        environment.pop("PYTHONPATH", None)
        if shipped:
            environment.update(CXX="no-compiler", NVCC="no-compiler")
        code = STEP.format(folder=str(own), shipped=shipped)
        subprocess.run([str(python), "-c", code], check=True, env=environment, cwd=folder)
    print(f"{file.name}: installed, and trained two steps")


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute())
