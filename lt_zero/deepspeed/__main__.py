"""``python -m lt_zero.deepspeed script.py ...``: run a script for DeepSpeed as it is; also under torchrun (``-m``)."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from lt_zero.deepspeed.install import as_deepspeed


def main() -> None:
    """Run the script that the arguments name, with those that follow."""
    if len(sys.argv) < 2:
        raise SystemExit("Name the script: python -m lt_zero.deepspeed script.py [arguments]")
    as_deepspeed()
    sys.argv = sys.argv[1:]
    sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
