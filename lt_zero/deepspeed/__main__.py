"""``python -m lt_zero.deepspeed script.py ...``: run a script for DeepSpeed as it is; also under torchrun (``-m``).

``python -m lt_zero.deepspeed -m package.module ...`` runs a module.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

from lt_zero.deepspeed.install import as_deepspeed


def main() -> None:
    """Run the script, or after ``-m`` the module, that the arguments name, with those that follow."""
    module = sys.argv[1:2] == ["-m"]
    if len(sys.argv) < 2 + module:
        raise SystemExit("Name the script: python -m lt_zero.deepspeed [script.py | -m module] [arguments]")
    as_deepspeed()
    sys.argv = sys.argv[1 + module :]
    if module:
        sys.path[0] = os.getcwd()  # as python -m does
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        return
    sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
