"""The exponential moving average of the weights."""
