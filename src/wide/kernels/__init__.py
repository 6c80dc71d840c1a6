"""Operators on tensors that skip what no token executes."""
