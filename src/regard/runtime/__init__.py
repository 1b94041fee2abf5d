"""Faster execution of trained models: CUDA graphs, static KV caches, packed weights. Changes speed, never a result."""
