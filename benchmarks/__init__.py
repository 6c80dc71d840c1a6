"""Benches, comparisons and tools around the package, run from a checkout: `python -m benchmarks.NAME --help`.

They share the package's races (`wide.inference.choice.tuning.race`) and its clock, and are no part of the wheel.
`wide bench` runs glue, naive, naive_depth and traffic from here, and times the kernels of `languages` where they are
named.
"""
