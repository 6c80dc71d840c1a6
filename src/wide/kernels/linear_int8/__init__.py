"""Products with int8 weights that have one scale for each output channel."""
