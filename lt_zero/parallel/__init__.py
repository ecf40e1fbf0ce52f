"""Tensor parallelism: the mesh of ranks, and parameters that are parts of tensors. Nothing below knows of it."""
