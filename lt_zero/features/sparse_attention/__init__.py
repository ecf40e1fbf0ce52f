"""Block-sparse attention: only the blocks of the attention matrix that a pattern names are computed."""
