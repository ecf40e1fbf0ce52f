"""Collectives as launch/wait pairs on gloo and NCCL, shared memory between ranks of a host, detection of hangs."""
