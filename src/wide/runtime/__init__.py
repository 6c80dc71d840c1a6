"""A straight-line forward over an attached model's own weights, for CUDA graphs and honest timing."""
