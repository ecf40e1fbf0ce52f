"""Monitoring of a run: printed lines, metrics for loggers, time, memory, FLOPs."""
