"""The way from backward to the next forward: loss scale, clipping, sharded optimizers, steps per bucket."""
