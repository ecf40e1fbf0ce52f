"""ZeRO++: weights and gradients in fewer bits, and a second copy of the weights inside a node."""
