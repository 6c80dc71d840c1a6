"""GEMM-MN: gathered rows times the weight rows of their groups (Q, up, gate)."""

from wide.kernels.gemm_mn.cases import GEMM_MN
from wide.kernels.gemm_mn.op import dense_mn, gemm_mn, misfit
from wide.kernels.gemm_mn.tiles import MnTile

__all__ = ["GEMM_MN", "MnTile", "dense_mn", "gemm_mn", "misfit"]
