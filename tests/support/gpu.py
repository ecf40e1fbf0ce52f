"""The device of tests marked ``gpu``; ``ZERO_TEST_DEVICE=cpu`` puts the CPU there, to try the tests themselves."""

from __future__ import annotations

import os

import torch

GPU = torch.device(os.environ.get("ZERO_TEST_DEVICE", "cuda"))
