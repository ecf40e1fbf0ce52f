"""Frozen weights that rest in 8 or 4 bits: ``quantize``."""
