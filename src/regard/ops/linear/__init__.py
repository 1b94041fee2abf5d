"""Causal linear attention in linear time."""
