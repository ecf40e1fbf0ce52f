"""Random states and the position in the data, saved and restored."""
