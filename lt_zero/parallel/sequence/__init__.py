"""Sequences that are cut over ranks: their attention, their loss and their batches.

``attention.py`` has the methods, ``loss.py`` the mean over tokens, and ``ranks.py`` the sequence ranks of the run.
``run.py`` is a run with such ranks: ``batches.py`` cuts what they read, and ``huggingface.py`` switches models.
"""
