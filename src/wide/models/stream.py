"""The residual stream on subspaces: a projection at the embedding and after every half-layer but the last.

A half-layer that would add `out` to the stream `x` adds `P(x + out) - x` instead, so that the stream becomes
`P(x + out)` with P = B B^T. The sub-layers see what they would see in a model whose stream has as many channels as B
has columns; only the work is not saved.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from wide.models.block_spec import AttentionSpec, BlockSpec, FeedForwardSpec
from wide.models.router import RoutingControl
from wide.models.static import hidden_of, with_hidden
from wide.plan import EMBEDDING_BASIS, basis_name

STREAM_NAME = "wide_stream"


class StreamBasis(nn.Module):
    """An orthonormal basis onto whose span the residual stream is projected.

    Args:
        basis: `[D, D']`, kept as float32.
        control: Shared by all gates and routers of the model.
        device: Where the basis lives.
    """

    def __init__(self, basis: Tensor, *, control: RoutingControl, device: torch.device | None = None) -> None:
        """Copy the basis."""
        super().__init__()
        values = basis.detach().to(device=device, dtype=torch.float32, copy=True).contiguous()
        self.basis = nn.Parameter(values, requires_grad=False)
        self.control = control
        self.residual: Tensor | None = None

    def project(self, stream: Tensor) -> Tensor:
        """Return the projection of `[..., D]`, in float32 or whatever is wider."""
        with torch.autocast(stream.device.type, enabled=False):
            dtype = torch.promote_types(stream.dtype, torch.float32)
            basis = self.basis.to(dtype)
            return (stream.to(dtype) @ basis) @ basis.T

    def remember(self, stream: Tensor) -> None:
        """Keep the stream that the running half-layer reads."""
        self.residual = stream if self.control.enabled else None

    def correct(self, output: Tensor) -> Tensor:
        """Return what the half-layer has to add so that the sum is projected."""
        residual, self.residual = self.residual, None
        if residual is None:
            return output
        return (self.project(residual + output) - residual).to(output.dtype)


def attach_stream(
    specs: Sequence[BlockSpec], tensors: Mapping[str, Tensor], control: RoutingControl
) -> tuple[list[RemovableHandle], list[tuple[nn.Module, str]]]:
    """Put the projections on a model; return the hooks and (module, attribute) of what was added.

    Args:
        specs: Parts of the decoder layers, whose halves each have a norm of their own in front.
        tensors: Bases by the names of `wide.plan`.
        control: Shared by all gates and routers of the model.
    """
    handles: list[RemovableHandle] = []
    added: list[tuple[nn.Module, str]] = []

    def put(module: nn.Module, name: str, spec: BlockSpec) -> None:
        device = next(spec.layer.parameters()).device
        module.add_module(STREAM_NAME, StreamBasis(tensors[name], control=control, device=device))
        added.append((module, STREAM_NAME))

    put(specs[0].layer, EMBEDDING_BASIS, specs[0])
    handles.append(specs[0].layer.register_forward_pre_hook(_project_input, with_kwargs=True))
    for spec in specs:
        halves: tuple[tuple[str, AttentionSpec | FeedForwardSpec | None], ...]
        halves = ("attention", spec.attention), ("ffn", spec.ffn)
        for half, part in halves:
            name = basis_name(spec.index, half)
            if name not in tensors:
                continue
            assert part is not None
            assert part.pre_norm is not None
            put(part.module, name, spec)
            handles.append(part.pre_norm.register_forward_pre_hook(_ShowStream(part.module)))
            handles.append(part.module.register_forward_hook(_project_output))
    return handles, added


def basis_of(module: nn.Module) -> StreamBasis:
    """Return the basis that `attach_stream` put on a sub-layer or on the first layer."""
    basis = getattr(module, STREAM_NAME)
    assert isinstance(basis, StreamBasis)
    return basis


class _ShowStream:
    """A pre-hook on a norm that shows its input, the residual stream, to the projection of its half-layer."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __call__(self, _norm: nn.Module, args: tuple[Any, ...]) -> None:
        basis_of(self.module).remember(args[0])


def _project_output(module: nn.Module, _args: tuple[Any, ...], output: Any) -> Any:
    return with_hidden(output, basis_of(module).correct(hidden_of(output)))


def _project_input(
    layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    basis = basis_of(layer)
    if not basis.control.enabled:
        return args, kwargs
    hidden = args[0] if args else kwargs["hidden_states"]
    projected = basis.project(hidden).to(hidden.dtype)
    return ((projected, *args[1:]), kwargs) if args else ((), kwargs | {"hidden_states": projected})
