"""Faults given to real runs, seeded: `make faults` runs all of them and writes a table (not part of any test suite)."""
