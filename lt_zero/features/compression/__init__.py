"""Gradients that are sent in fewer bits, with error feedback: ``gradient_compression``."""
