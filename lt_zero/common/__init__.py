"""Tools that every floor uses: compatibility, timing, progress on the terminal, trees of tensors, errors."""
