"""Rounds in a Trainer: one of Lightning's batches is a round, of which a rank runs several micro-batches in turn."""
