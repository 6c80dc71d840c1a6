"""The methods of the benchmark: each decides what a model runs, writes a plan, and attaches it."""
