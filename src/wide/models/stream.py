"""The residual stream on subspaces: a projection at the embedding and after every sublayer but the last.

A sublayer that would add `out` to the stream `x` adds `P(x + out) - x` instead, so that the stream becomes
`P(x + out)` with P = B B^T. The sublayers see what they would see in a model whose stream has as many channels as B
has columns; only the work is not saved.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from wide.models.block_spec import BlockSpec
from wide.models.gates import Pending, hidden_of, input_of, with_hidden
from wide.models.pretrained import computing_device
from wide.models.router import RoutingControl
from wide.plan import EMBEDDING_BASIS, basis_name

STREAM_NAME = "wide_stream"


def project(stream: Tensor, basis: Tensor) -> Tensor:
    """Return `[..., D]` projected onto the span of the columns of `basis` `[D, D']`, in float32 or what is wider."""
    dtype = torch.promote_types(stream.dtype, torch.float32)
    columns = basis.to(stream.device, dtype)
    with torch.autocast(stream.device.type, enabled=False):
        return (stream.to(dtype) @ columns) @ columns.T


class StreamBasis(nn.Module):
    """An orthonormal basis `[D, D']`, kept as float32, onto whose span the residual stream is projected.

    `name` is that of its tensor in the plan.
    """

    def __init__(self, name: str, basis: Tensor, *, control: RoutingControl, device: torch.device) -> None:
        super().__init__()
        self.name = name
        values = basis.detach().to(device=device, dtype=torch.float32, copy=True).contiguous()
        self.basis = nn.Parameter(values, requires_grad=False)
        self.control = control
        self.residual = Pending()

    def forward(self, stream: Tensor) -> Tensor:
        """Return the stream `[..., D]` projected; a call, so that accelerate brings a basis that it has offloaded."""
        return project(stream, self.basis)

    def remember(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Keep the input of a norm, the stream, until the sublayer has run (a forward pre-hook)."""
        self.residual.value = input_of(args, kwargs)

    def project_output(self, _module: nn.Module, _args: tuple[Any, ...], output: Any) -> Any:
        """Let the sublayer add to the stream that it read what makes the sum a projected one (a forward hook)."""
        residual = self.residual.take()
        if residual is None or not self.control.enabled:
            return output
        added = hidden_of(output)
        return with_hidden(output, (self(residual + added) - residual).to(added.dtype))

    def project_input(
        self, _layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Project the stream that the first layer reads (a forward pre-hook)."""
        if not self.control.enabled:
            return args, kwargs
        hidden = input_of(args, kwargs)
        projected = self(hidden).to(hidden.dtype)
        return ((projected, *args[1:]), kwargs) if args else ((), kwargs | {"hidden_states": projected})


def attach_stream(
    specs: Sequence[BlockSpec],
    tensors: Mapping[str, Tensor],
    control: RoutingControl,
    handles: list[RemovableHandle],
    parts: list[tuple[nn.Module, str]],
) -> None:
    """Put the projections on a model whose sublayers each have a norm of their own in front."""

    def put(module: nn.Module, name: str, layer: nn.Module) -> StreamBasis:
        basis = StreamBasis(name, tensors[name], control=control, device=computing_device(layer))
        module.add_module(STREAM_NAME, basis.train(module.training))
        parts.append((module, STREAM_NAME))
        return basis

    entry = put(specs[0].layer, EMBEDDING_BASIS, specs[0].layer)
    handles.append(specs[0].layer.register_forward_pre_hook(entry.project_input, with_kwargs=True))
    for spec in specs:
        for sublayer, part in spec.sublayers():
            name = basis_name(spec.index, sublayer)
            if name not in tensors:
                continue
            assert part.pre_norm is not None
            basis = put(part.module, name, spec.layer)
            handles.append(part.pre_norm.register_forward_pre_hook(basis.remember, with_kwargs=True))
            handles.append(part.module.register_forward_hook(basis.project_output))
