"""Tools beside training."""
