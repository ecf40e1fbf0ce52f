"""Sequences that are cut over ranks: their attention and their loss.

``attention.py`` has the methods, ``loss.py`` the mean over tokens, and ``ranks.py`` the sequence ranks of the run.
"""
