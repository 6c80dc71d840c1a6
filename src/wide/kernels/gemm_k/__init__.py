"""GEMM-K: the sum over a row's executing groups (O, down)."""
