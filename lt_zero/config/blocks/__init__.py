"""The blocks of the configuration, one file each."""
