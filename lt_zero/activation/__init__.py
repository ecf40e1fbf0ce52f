"""Recomputing activations in backward (arXiv:1604.06174): what is checkpointed, and how."""
