"""Measurements of mechanisms: cost, attention matrices, properties of positions, equivalent layers."""
