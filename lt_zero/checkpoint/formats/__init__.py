"""Checkpoints that other programs wrote, read without them."""
