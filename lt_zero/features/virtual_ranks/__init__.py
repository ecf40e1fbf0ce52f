"""Training with the same bits at any number of ranks: ``reproducible``."""
