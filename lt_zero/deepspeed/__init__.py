"""DeepSpeed's names for scripts that import them: ``lt_zero.as_deepspeed()`` answers ``import deepspeed``.

``names.tsv`` is the table: each name of a module of DeepSpeed is an object of ours, a value, or a remedy.
"""
