"""Other ways to exchange gradients and weights than in full after each step (core/engine/exchange.py)."""
