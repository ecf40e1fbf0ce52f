"""Packages outside of lt_zero that extend it, and tests that use them: see docs/internals/features.md."""
