"""States of optimizers in 8 bits, and master weights in bf16 that are rounded at random."""
