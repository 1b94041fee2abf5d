"""Figures: mechanisms, the gallery of all of them, training curves."""
