"""Hydra's configuration groups for lt_zero: files only, found by ``hydra.searchpath: [pkg://lt_zero.conf]``.

Keys of lt_zero lie where a DeepSpeed file has them; ``trainer`` and ``model`` belong to the application.
"""
