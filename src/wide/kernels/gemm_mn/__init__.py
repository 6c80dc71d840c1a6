"""GEMM-MN: gathered rows times the weight rows of their groups (Q, up, gate)."""

from wide.kernels.gemm_mn.op import MnShape, finish_dense, gemm_mn

__all__ = ["MnShape", "finish_dense", "gemm_mn"]
