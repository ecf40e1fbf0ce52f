"""The ZeRO engine: partition, buckets, gathering, gradient reduction, hooks, guards. Imports no Lightning."""
