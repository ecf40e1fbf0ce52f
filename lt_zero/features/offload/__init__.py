"""Offload: weights, gradients and optimizer states in host memory or files."""
