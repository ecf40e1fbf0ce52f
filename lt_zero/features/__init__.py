"""Features of a run beside sharding: each folder is one, and can be taken out."""
