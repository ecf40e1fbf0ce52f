"""DeepSpeed's names for scripts that import them: ``lt_zero.as_deepspeed()`` answers ``import deepspeed``.

``names.tsv`` lists DeepSpeed's names. For each it has the object of lt_zero, a value, or the text of an error.
"""
