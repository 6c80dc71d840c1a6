"""Routers: hidden states to the mask of executing groups, alone or with the norm before it."""

from wide.kernels.route.operator import NORM_ROUTE, ROUTE, norm_route, route
from wide.kernels.route.weights import RouteWeights, split_weights

__all__ = ["NORM_ROUTE", "ROUTE", "RouteWeights", "norm_route", "route", "split_weights"]
