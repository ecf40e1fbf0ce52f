"""What every pool worker needs, imported once by the process that workers are forked from."""

from __future__ import annotations

import gc
import os

gc.disable()  # what is imported lives for ever: nobody needs to look for garbage meanwhile
os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1")

import torch
import torch._dynamo

import tests.support.lightning_tools  # noqa: F401
import tests.support.parity  # noqa: F401

torch.set_num_threads(1)
gc.freeze()
gc.enable()
