"""1-bit Adam, 1-bit LAMB and 0/1 Adam: optimizers that exchange momenta in one bit."""
