"""The strategy and the precision plugin for Lightning's Trainer, and everything that watches a run."""
