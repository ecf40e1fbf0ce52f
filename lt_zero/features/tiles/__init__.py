"""Long sequences on one rank: layers and losses that are computed in tiles, of tokens or of weights."""
