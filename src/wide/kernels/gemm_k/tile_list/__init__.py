"""The list of tiles that the Hopper kernel of GEMM-K runs."""
