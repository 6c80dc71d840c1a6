"""A router of an optimised model, decided by one kernel."""

from typing import Any

import torch
from torch import Tensor

from wide.kernels.route import RouteWeights, route, split_weights
from wide.models.router import Router

_HALVES = (torch.float16, torch.bfloat16)


class FusedRouter:
    """The forward of a bottleneck router, by the operator `route` where nothing but the mask is asked for.

    Observed and replayed routing, gradients and compiled graphs take the router's own forward. Margins are those of the
    router up to float32 rounding and 16 bits of each weight, so a decision at the very threshold may fall on either
    side.

    Args:
        router: In evaluation mode, with a down matrix.
        backend: Of the operator.
    """

    def __init__(self, router: Router, backend: str) -> None:
        """Keep the router; its weights are split when the first rows of a dtype come."""
        self.router, self.backend = router, backend
        self.original = router.forward
        self._weights: RouteWeights | None = None
        self._made_of: tuple[Any, ...] = ()

    def __call__(self, hidden: Tensor) -> Tensor:
        """Return the mask, bool `[..., N_G]`, for hidden states `[..., D]`."""
        router, control = self.router, self.router.control
        is_asked_more = router.training or control.observed is not None or control.forced is not None
        if is_asked_more or torch.is_grad_enabled() or torch.compiler.is_compiling():
            return self.original(hidden)
        rows = hidden.reshape(-1, hidden.shape[-1])
        if rows.stride(1) != 1 or (self.backend == "triton" and rows.dtype not in _HALVES):
            return self.original(hidden)
        mask = route(rows, self._split(rows.dtype), threshold=router.threshold, backend=self.backend)
        return mask.view(*hidden.shape[:-1], -1)

    def _split(self, dtype: torch.dtype) -> RouteWeights:
        """Return the weights in the kernel's form, made anew when a parameter has changed since."""
        router = self.router
        assert router.down is not None
        parameters = [part for part in (router.down, router.up, router.bias) if part is not None]
        made_of = (dtype, *((part.data_ptr(), part._version) for part in parameters))
        if self._weights is None or made_of != self._made_of:
            # Made during a capture, they would belong to the graph, and hold nothing before it runs.
            found = split_weights(router.down, router.up, router.bias, dtype=dtype)
            if router.down.is_cuda and torch.cuda.is_current_stream_capturing():
                return found
            self._weights, self._made_of = found, made_of
        return self._weights
