"""Our own checkpoint directories: written by all ranks, read by any number of them."""
