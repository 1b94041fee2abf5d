"""The delta rule in linear time."""
