"""What a static plan leaves of a layer's projections, with zeros where kernels want even sizes."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from wide.materialisation.stream import bases_around, norm_scales
from wide.models.block_spec import AttentionSpec, BlockSpec, FeedForwardSpec, plain_linear
from wide.models.gates import GATE_NAME

# Products of other sizes take slower kernels of the library.
_MULTIPLE = 64


class Subspace(NamedTuple):
    """The residual stream around a sublayer under a plan that projects it.

    Args:
        before: Basis of what the sublayer reads, float64 [D, D'].
        after: Basis of what it leaves, [D, D']; None = all of D.
        scale: What the norm multiplies by, float64 [D], and what its mean over D' makes too small.
    """

    before: Tensor
    after: Tensor | None
    scale: Tensor

    @property
    def shortcut(self) -> Tensor:
        """The matrix that takes the stream from one basis to the next, [D' or D, D']."""
        return self.before if self.after is None else self.after.T @ self.before


class Projections(NamedTuple):
    """The projections of a sublayer: those that read the stream, the one back, and the channels between."""

    reading: list[nn.Linear]
    output: nn.Linear
    width: int


def padded_basis(basis: Tensor) -> Tensor:
    """Return a basis [D, D'] in float64 with columns of zeros behind it, so that kernels take it."""
    return functional.pad(basis.detach().double(), (0, -basis.shape[1] % _MULTIPLE))


def subspaces(spec: BlockSpec, tensors: Mapping[str, Tensor], num_layers: int) -> tuple[Subspace, Subspace]:
    """Return the stream around a layer's attention and FFN; `tensors` are the plan's."""
    bases = [None if each is None else padded_basis(each) for each in bases_around(tensors, spec.index, num_layers)]
    first, second, last = bases
    assert first is not None
    assert second is not None
    ratio = (spec.hidden_size / first.shape[1]) ** 0.5
    scales = [(each * ratio).to(first.device) for each in norm_scales(spec)]
    return Subspace(first, second, scales[0]), Subspace(second, last, scales[1])


def read_projections(spec: BlockSpec, part: AttentionSpec | FeedForwardSpec, space: Subspace | None) -> Projections:
    """Return what is left of a sublayer: the model's own layers where nothing is pruned, else smaller copies.

    KV heads all stay, each with as many query heads as the fullest of them has left; the others' are zeros.
    """
    *reading, output = [plain_linear(each, spec.index) for each in part.linears()]
    is_attention = isinstance(part, AttentionSpec)
    width = part.query_width if isinstance(part, AttentionSpec) else part.width
    gate: Any = getattr(part.module, GATE_NAME, None)
    if gate is not None:
        factors = gate.factors().detach().to(output.weight.device)
        scale = factors.repeat_interleave(width // factors.numel())
        left = _heads_left(part, scale) if isinstance(part, AttentionSpec) else _channels_left(scale)
        for place, linear in enumerate(reading[:1] if is_attention else reading):
            # Of fused projections: keys and values, or the other half of the channels.
            rest = torch.arange(width, linear.out_features, device=left.device)
            if not is_attention and len(rest):
                rest = torch.where(left < 0, left, left + width)
            rows = torch.cat((left, rest))
            bias = None if linear.bias is None else _picked(linear.bias, rows)
            reading[place] = _linear(_picked(linear.weight, rows), bias, linear)
        output = _linear(_picked((output.weight * scale).T, left).T, output.bias, output)
        width = left.numel()
    if space is not None:
        reading = [_linear(each.weight.double() * space.scale @ space.before, each.bias, each) for each in reading]
        if space.after is not None:
            bias = None if output.bias is None else space.after.T @ output.bias.double()
            output = _linear(space.after.T @ output.weight.double(), bias, output)
    return Projections(reading, output, width)


def _heads_left(part: AttentionSpec, scale: Tensor) -> Tensor:
    """Return the query channels that stay, by KV head, int64; -1 stands for a channel of zeros."""
    if part.q_norm == "width":
        # The norm needs them all; what is pruned has weights of zero in the output.
        return torch.arange(part.query_width, device=scale.device)
    kept = scale.view(part.num_kv_heads, -1, part.head_dim)[:, :, 0] != 0
    most = max(1, int(kept.sum(1).max()))
    first = kept.int().argsort(dim=1, descending=True, stable=True)[:, :most]
    heads = first + kept.shape[1] * torch.arange(len(kept), device=scale.device)[:, None]
    channels = heads[..., None] * part.head_dim + torch.arange(part.head_dim, device=scale.device)
    return channels.where(kept.gather(1, first)[..., None], -1).flatten()


def _channels_left(scale: Tensor) -> Tensor:
    """Return the intermediate channels that stay, int64; -1 stands for a channel of zeros."""
    left = scale.nonzero().flatten()
    room = max(_MULTIPLE, -(-len(left) // _MULTIPLE) * _MULTIPLE)
    return functional.pad(left, (0, min(room, len(scale)) - len(left)), value=-1)


def _picked(tensor: Tensor, rows: Tensor) -> Tensor:
    """Return these rows of a tensor [N, ...]; -1 is a row of zeros."""
    return torch.cat((tensor.detach(), torch.zeros_like(tensor[:1])))[rows]


def _linear(weight: Tensor, bias: Tensor | None, like: nn.Linear) -> nn.Linear:
    """Return a layer with these weights [N, K] and bias [N], in the dtype of another."""
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    linear.weight = nn.Parameter(weight.detach().to(like.weight.dtype).contiguous(), requires_grad=False)
    if bias is not None:
        linear.bias = nn.Parameter(bias.detach().to(like.weight.dtype), requires_grad=False)
    return linear
