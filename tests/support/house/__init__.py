"""Measures of the package's structure: ``python -m tests.support.house``.

``parts.py`` says which files make up which part; each measure has a file. ``ceilings.py`` keeps the figures that may
not rise, for tests/test_house.py.
"""
