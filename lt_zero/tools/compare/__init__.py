"""Records of runs, and ``lt-zero compare``, which finds the first difference of two."""
