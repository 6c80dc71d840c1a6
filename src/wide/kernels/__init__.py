"""Operators on tensors that skip what no token executes.

Each raises ShapeError if its tensors or options do not fit, and UnsupportedBackendError if its backend cannot run here.
"""
