"""Training in a loop of one's own: the interface of DeepSpeed's engine over ours. Knows nothing of Lightning."""
