"""Measures which way of each operator is the fastest on this GPU, dense products included."""
