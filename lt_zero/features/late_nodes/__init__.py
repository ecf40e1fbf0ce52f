"""Sums that do not wait for late nodes: ``communication.slow_node_tolerance``."""
