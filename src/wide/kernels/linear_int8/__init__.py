"""Products with int8 weights that have one scale for each output channel."""

from wide.kernels.int8 import quantise_int8
from wide.kernels.linear_int8.op import MAX_ROWS, MAX_WHOLE_ROWS, expand_int8, linear_int8, quantise_rows

__all__ = ["MAX_ROWS", "MAX_WHOLE_ROWS", "expand_int8", "linear_int8", "quantise_int8", "quantise_rows"]
