"""The ZeRO engine: layout, collectives, buckets, hooks, optimizer fragments. Imports no Lightning."""
