"""Kernels in CUDA C++: compiled when first used, launched through the driver."""
