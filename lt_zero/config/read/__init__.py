"""From text, files and mappings to plain values with their places."""
