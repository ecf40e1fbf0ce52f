"""What every pool worker needs, imported once by the process that workers are forked from."""

from __future__ import annotations

import os

os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1")

import lightning.pytorch  # noqa: F401
import torch
import torch._dynamo

import lt_zero  # noqa: F401

torch.set_num_threads(1)
