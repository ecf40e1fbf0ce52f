"""Optimizer steps in one pass over memory, as torch.optim and ``lt_zero.optim`` compute them.

Each reference defines its operation: the same numbers to the last bit where torch fuses multiply and add. A run imports
the steps of its optimizer only.
"""
