"""The core: sharded training on torch alone. It knows no configuration and no feature."""
