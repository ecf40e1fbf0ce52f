"""The strategy and the precision plugin for Lightning's Trainer, and the observers of a run."""
