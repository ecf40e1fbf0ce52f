"""Recomputing activations in backward (arXiv:1604.06174): the choice of modules, and their recomputation."""
