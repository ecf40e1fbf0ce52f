"""Detects ranks that hang, end or diverge, and turns them into errors on all ranks."""
