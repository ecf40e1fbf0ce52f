"""What happens between backward and the next forward: loss scale, clipping, sharded optimizers, steps per bucket."""
