"""The router: hidden states to per-group decisions (paper, section 3.1), and its forms in other methods."""

import math
import threading
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from wide.errors import ShapeError, UnsupportedModelError
from wide.plan import Routed, RouterForm
from wide.routing import LayerRouting, Routing

EXECUTE, SKIP = 0, 1
ALWAYS = 50.0  # No threshold goes so high. Groups that always execute begin far above, whatever weight decay takes off.
THRESHOLD_NAME = "threshold"
"""The entry of a router's state dict beside its parameters."""
# D-LLM's routers begin by executing about 87 % of the tokens.
_DLLM_EXECUTE, _DLLM_SKIP = 2.0, 0.1
_NORM_EPS = 1e-6


class Sampling:
    """How the routers of one model draw masks in training mode, in whatever thread; the trainer writes it."""

    def __init__(self) -> None:
        # Of the Gumbel-softmax: a number, or a float32 scalar on the model's device where a compiled graph reads it.
        self.temperature: float | Tensor = 1.0


class RoutingControl(threading.local):
    """What the routers and gates of one model do in the forwards of one thread: each thread has its own values.

    The context managers of `wide.models.observe` write it. Nothing counts steps inside a forward, because gradient
    checkpointing runs forwards twice. `sampling` is the same in all threads: on GPUs a layer that is recomputed runs in
    a thread of autograd.
    """

    def __init__(self, sampling: Sampling) -> None:
        """Start enabled and observed by nobody; Python calls this in every thread that comes."""
        self.sampling = sampling
        self.enabled = True
        self.observed: list[LayerRouting] | None = None
        self.forced: list[LayerRouting] | None = None
        self.forced_position: dict[tuple[int, str], int] = {}
        # Which tokens of the running forward are the first ones of their sequence, bool [B, T]; for routers that care.
        self.first: Tensor | None = None
        # Where the layer that runs has masks and margins noted; None leaves it to `observed`.
        self.seen: LayerRouting | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        """Let copies and pickles begin anew."""
        return type(self), (self.sampling,)


class Router(nn.Module):
    """Decides for each token which groups of one sublayer execute, from hidden states of `hidden_size` channels D.

        R = reshape(X W1 W2), class 0 executes, class 1 skips

    That is the form 'bottleneck'; `wide.plan.Routed` says what the others put in place of the two matrices. Parameters
    are float32 whatever the base model's dtype. In training mode the mask is a hard Gumbel-softmax sample with
    straight-through gradient; in evaluation mode it is `margin >= threshold`, and a threshold of 0 is the paper's
    argmax with ties executing.

    Source: paper, section 3.1; initialisation: Kaiming-uniform with gain 1 on all matrices and zero biases, with a
    ReLU's gain where one follows ('mlp', as SkipGPT's code). 'dllm' begins as torch's linear layers do, with D-LLM's
    output bias.
    """

    def __init__(
        self,
        hidden_size: int,
        routed: Routed,
        *,
        control: RoutingControl,
        layer_index: int,
        half: str,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        num_groups, rank = routed.grouping.num_groups, routed.rank
        self.num_groups = num_groups
        self.layer_index = layer_index
        self.half_layer = half
        self.form: RouterForm = routed.form
        self.reads_layer_input = routed.router_input == "layer_input"
        self.reads_residual = routed.router_input != "normed"
        self.protects_first = routed.first_tokens > 0

        def empty(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, dtype=torch.float32, device=device))

        is_paper = self.form == "bottleneck"
        self.down = empty(rank, hidden_size)
        self.down_bias = None if is_paper else empty(rank)
        self.norm = empty(rank) if self.form == "dllm" else None
        self.up = empty(2 * num_groups, rank)
        self.bias = empty(2 * num_groups) if routed.bias or not is_paper else None
        self.threshold = 0.0
        self.control = control
        # Whether the FFN of the layer goes by this router too.
        self.is_followed = False
        self.reset_parameters()

    def extra_repr(self) -> str:
        """Say what it decides, in a printed model."""
        return f"{self.half_layer}, {self.num_groups} groups, {self.form}, threshold {self.threshold:g}"

    def reset_parameters(self, *, like_linear: bool = False) -> None:
        """Draw new weights, if so asked with biases as torch's linear layers do, as 'dllm' does anyway."""
        like_linear |= self.form == "dllm"
        with torch.no_grad():
            # Else Kaiming-uniform with gain 1, or a ReLU's before one.
            first, second = (1.0, 1.0) if like_linear else (6.0 if self.form == "mlp" else 3.0, 3.0)
            for weight, bias, spread in ((self.down, self.down_bias, first), (self.up, self.bias, second)):
                bound = math.sqrt(spread / weight.shape[1])
                weight.uniform_(-bound, bound)
                if bias is not None:
                    bias.uniform_(-bound, bound) if like_linear else bias.zero_()
            if self.norm is not None:
                self.norm.fill_(1.0)
            if self.bias is not None and self.form == "dllm":
                self.bias.copy_(self.bias.new_tensor((_DLLM_EXECUTE, _DLLM_SKIP)).repeat(self.num_groups))

    # A number, because executors bake it in; in state dicts a float64 scalar beside the parameters. Files of adapters
    # and checkpoints keep it in their configuration.
    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)  # type: ignore[no-untyped-call]
        # A router without values is about to be filled from a file, whose tensors are the parameters.
        if not self.up.is_meta:
            destination[f"{prefix}{THRESHOLD_NAME}"] = torch.tensor(self.threshold, dtype=torch.float64)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        # Older states have none, and leave the threshold in force as it is.
        threshold = state_dict.pop(f"{prefix}{THRESHOLD_NAME}", None)
        super()._load_from_state_dict(state_dict, prefix, *args)  # type: ignore[no-untyped-call]
        if threshold is not None:
            self.threshold = float(threshold)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return router logits `[..., N_G, 2]`, float32, from hidden states `[..., D]` of any dtype."""
        with torch.autocast(hidden.device.type, enabled=False):
            inner = linear_float32(hidden, self.down, self.down_bias)
            if self.form == "mlp":
                inner = functional.relu(inner)
            elif self.norm is not None:
                inner = functional.silu(functional.rms_norm(inner, inner.shape[-1:], self.norm.float(), _NORM_EPS))
            logits = linear_float32(inner, self.up, self.bias)
        return logits.unflatten(-1, (self.num_groups, 2))

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the mask `[..., N_G]` for hidden states `[..., D]`: float32 in training, bool in evaluation."""
        logits = self.logits(hidden)
        margin = logits[..., EXECUTE] - logits[..., SKIP]
        control = self.control
        if control.forced is not None:
            mask = self._forced_mask(control.forced, margin)
        elif self.training:
            # The temperature may be a scalar on the device: it divides only.
            heat: Any = control.sampling.temperature
            mask = functional.gumbel_softmax(logits, tau=heat, hard=True)[..., EXECUTE]
        else:
            mask = margin >= self.threshold
        if self.protects_first and control.forced is None:
            if control.first is not None:
                mask = mask.masked_fill(control.first.unsqueeze(-1), 1)
            elif self.training:
                raise UnsupportedModelError(
                    f"layer {self.layer_index}: the first tokens of a sequence execute always, and this thread has not "
                    "seen which they are; switch transformers' gradient checkpointing off (wide.prune has its own)"
                )
        seen = control.seen
        if seen is None and control.observed is not None:
            seen = control.observed[self.layer_index]
        if seen is not None:
            for half in ("attention", "ffn") if self.is_followed else (self.half_layer,):
                setattr(seen, half, mask)
                setattr(seen, f"{half}_margin", margin)
        return mask

    def _forced_mask(self, forced: Routing, margin: Tensor) -> Tensor:
        mask = getattr(forced[self.layer_index], self.half_layer)
        if mask is None:
            return margin >= self.threshold
        key = (self.layer_index, self.half_layer)
        start = self.control.forced_position.get(key, 0)
        length = margin.shape[-2]
        piece = mask[:, start : start + length]
        if piece.shape != margin.shape:
            raise ShapeError(
                f"forced {self.half_layer} mask of layer {self.layer_index} has shape {tuple(mask.shape)}, used up to "
                f"position {start}; this forward needs {tuple(margin.shape)} [batch, tokens, groups]"
            )
        # Another dictionary, because a layer that is recomputed starts where it did before.
        self.control.forced_position = self.control.forced_position | {key: start + length}
        return piece.to(device=margin.device, dtype=margin.dtype if self.training else torch.bool)


def linear_float32(inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return `inputs [..., in] @ weight.T + bias` in float32, whatever the types; `weight` is `[out, in]`, of few rows.

    On a GPU, bfloat16 inputs are read as they are: tensor cores multiply them with the two bfloat16 pieces of the
    weight and add up in float32, which is as good as float32 to some 1e-5. A float32 copy of the inputs would cost more
    than the product, and would be kept for the backward.
    """
    bias = None if bias is None else bias.float()
    if inputs.dtype == torch.bfloat16 and inputs.is_cuda:
        apply: Any = LinearInPieces.apply
        result: Tensor = apply(inputs.flatten(0, -2), weight.float()).unflatten(0, inputs.shape[:-1])
        return result if bias is None else result + bias
    return functional.linear(inputs.float(), weight.float(), bias)


class LinearInPieces(torch.autograd.Function):
    """`inputs [T, in] bfloat16 @ weight.T` for a float32 weight `[out, in]`, as products of bfloat16 pieces."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor) -> Tensor:
        """Return float32 `[T, out]`."""
        ctx.save_for_backward(inputs, weight)
        return _product(inputs, _pieces(weight, dim=0).T).unflatten(1, (2, -1)).sum(1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Return the gradients of inputs, rounded to bfloat16 like all around it, and of weight, float32."""
        inputs, weight = ctx.saved_tensors
        of_inputs = of_weight = None
        if ctx.needs_input_grad[0]:
            of_inputs = slope.bfloat16() @ weight.bfloat16()
        if ctx.needs_input_grad[1]:
            of_weight = _product(_pieces(slope, dim=1).T, inputs).unflatten(0, (2, -1)).sum(0)
        return of_inputs, of_weight


def _pieces(values: Tensor, *, dim: int) -> Tensor:
    """Return float32 values rounded to bfloat16, and along a dimension after them what that leaves."""
    first = values.bfloat16()
    return torch.cat([first, (values - first.float()).bfloat16()], dim)


def _product(left: Tensor, right: Tensor) -> Tensor:
    return torch.mm(left, right, out_dtype=torch.float32) if left.is_cuda else left.float() @ right.float()
