"""GEMM-K: the sum over a row's executing groups (O, down)."""

from wide.kernels.gemm_k.op import KShape, gemm_k, gemm_k_rows

__all__ = ["KShape", "gemm_k", "gemm_k_rows"]
