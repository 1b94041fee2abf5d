"""Compare mechanisms on tasks: a grid of small trained models, their speed and memory, and the report."""
