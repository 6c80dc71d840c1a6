"""GEMM-MN: gathered rows times the weight rows of their groups (Q, up, gate)."""
