"""Pipelines: ranks that have some of a model's layers each, one after the other."""
