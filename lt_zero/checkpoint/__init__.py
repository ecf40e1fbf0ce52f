"""Saving and loading sharded states."""
