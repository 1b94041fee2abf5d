"""Softmax attention over the pairs of a pattern, in tiles."""
