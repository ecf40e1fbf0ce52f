"""What a run tells: printed lines, metrics for loggers, time, memory, FLOPs."""
