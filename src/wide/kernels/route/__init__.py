"""Routers: hidden states to the mask of executing groups, alone or with the norm before it."""

from wide.kernels.route.op import MAX_FEW_ROWS, norm_route, route
from wide.kernels.route.weights import RouteWeights, split_weights

__all__ = ["MAX_FEW_ROWS", "RouteWeights", "norm_route", "route", "split_weights"]
