"""How the engine takes linear layers: stacked in one buffer, or as int8 copies, whose own weights wait on the host."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from wide.errors import NotAttachedError, UnsupportedModelError
from wide.inference.operators.products import LinearWeights
from wide.kernels.device import HALF
from wide.kernels.int8 import hadamard, quantise_int8
from wide.models.block_spec import BlockSpec

WEIGHTS = ("model", "int8", "w8a8")
"""Formats of the weights under the routers: the model's own dtype, or int8 with a scale for each output channel; with
'w8a8' products of many rows but those of queries, keys and values read these in int8, too, a scale for each row."""


class Weights:
    """Takes linear layers as the engine multiplies them, in one of `WEIGHTS`, and gives the model its own back.

    The embedding's weight, `near`, stays where the model computes; `specs` are of all layers.
    """

    def __init__(self, form: str, near: Tensor, specs: Sequence[BlockSpec]) -> None:
        self._form, self._near = form, near
        # What reads a sublayer's input may come to lie in one buffer.
        self._reading = [linear for spec in specs for _, part in spec.sublayers() for linear in part.linears()[:-1]]
        self.quantised: list[nn.Linear] = []
        self.saved_bytes = 0

    def take(self, linears: Sequence[nn.Linear], where: str, *, rounds: bool = True, rotates: int = 1) -> LinearWeights:
        """Return layers that read one input as one, N = the sum of theirs.

        In the model's dtype they are moved into one buffer that their modules then view. In int8 they get a copy, and
        compute with it; their own weights move to host memory, but for that of the embedding where a head shares it.
        With `rounds` many rows may be quantised; blocks that are rotated then divide the input channels `rotates`, of a
        group or all. Raises UnsupportedModelError if only some have a bias, or one has weights that cannot be
        quantised.
        """
        if len({linear.bias is None for linear in linears}) > 1:
            raise UnsupportedModelError(f"{where}: some of the projections have a bias and some have none")
        if self._form == "model":
            biases = [linear.bias for linear in linears if linear.bias is not None]
            return LinearWeights(stack([linear.weight for linear in linears]), stack(biases) if biases else None)
        rounds = rounds and self._form == "w8a8"
        turn = hadamard(rotates, linears[0].weight.detach()) if rounds else None
        parts = [self._quantise(linear, where, turn) for linear in linears]
        whole = parts[0]
        if len(parts) > 1:
            columns = zip(*(part[:3] for part in parts), strict=True)
            weight, bias, scale = (None if one[0] is None else torch.cat(one) for one in columns)  # type: ignore[arg-type]
            assert weight is not None
            whole = LinearWeights(weight, bias, scale)
        whole = whole._replace(int8_rows=rounds, rotation=turn)
        end = 0
        for linear, part in zip(linears, parts, strict=True):
            end += part.outputs
            self._stand_in(linear, whole.rows(end - part.outputs, end))
        return whole

    def give_back(self, *, drops: bool = False) -> None:
        """Let layers have their own weights again, bit for bit those that they had, each in memory of its own.

        Where memory does not suffice, all stay in host memory. With `drops` the copies go first: nobody uses them.
        """
        if drops:
            self._forget()
        own = [linear.weight.data for linear in self.quantised]
        try:
            for linear in self.quantised:
                linear.weight.data = linear.weight.data.to(self._near.device)
        except BaseException:
            for linear, weight in zip(self.quantised, own, strict=True):
                linear.weight.data = weight
            raise
        # Last: another thread may run the masked model.
        self._forget()
        self.quantised, self.saved_bytes = [], 0
        # Saving and sharding must see independent tensors.
        for module in self._reading:
            for parameter in (module.weight, module.bias) if isinstance(module, nn.Linear) else ():
                if parameter is not None and parameter.untyped_storage().nbytes() > parameter.nbytes:
                    parameter.data = parameter.data.clone()

    def _forget(self) -> None:
        for linear in self.quantised:
            for name in ("forward", *REFUSED_COPIES):
                vars(linear).pop(name, None)

    def _quantise(self, linear: nn.Linear, where: str, turn: Tensor | None) -> LinearWeights:
        weight = linear.weight.detach()
        if weight.is_cuda and weight.dtype not in HALF:
            raise UnsupportedModelError(
                f"{where}: weights={self._form!r} needs bfloat16 or float16 on a GPU, got {weight.dtype}; convert "
                "the model"
            )
        if "forward" in vars(linear):
            raise UnsupportedModelError(
                f"{where}: weights={self._form!r} replaces a forward that is not its class's; remove it"
            )
        values, scale = quantise_int8(weight, vars(linear).get("weight_scale"), turn)
        if not bool(scale.isfinite().all()):
            raise UnsupportedModelError(
                f"{where}: weights hold NaN or infinity, which int8 cannot; use weights='model'"
            )
        bias = None if linear.bias is None else linear.bias.detach()
        return LinearWeights(values, bias, scale)

    def _stand_in(self, linear: nn.Linear, weights: LinearWeights) -> None:
        if linear.weight is not self._near:
            linear.weight.data = linear.weight.data.cpu()
            self.saved_bytes += linear.weight.nbytes
        before = weights.weight.device, *state_of(linear.weight)

        def forward(x: Tensor) -> Tensor:
            nonlocal weights, before
            with torch.no_grad():
                if not torch.compiler.is_compiling() and before != (x.device, *state_of(linear.weight)):
                    # The engine reads what was written since with its next prompt; graphs may hold its copy until then.
                    before = x.device, *state_of(linear.weight)
                    values, scale = quantise_int8(linear.weight.to(x.device), rotation=weights.rotation)
                    weights = weights._replace(weight=values, scale=scale)
                out = weights._replace(bias=linear.bias).dense(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], -1)
            if torch.is_grad_enabled() and x.requires_grad:
                out.requires_grad_().register_hook(refuse_gradients)
            return out

        vars(linear).update(REFUSED_COPIES, forward=forward)
        assert weights.scale is not None
        self.saved_bytes -= weights.weight.nbytes + weights.scale.nbytes
        self.quantised.append(linear)


def state_of(parameter: Tensor) -> tuple[int, int | None]:
    """Return where a tensor lies and how often it was written; what `.data` and inference mode write is not seen."""
    return parameter.data_ptr(), None if parameter.is_inference() else parameter._version


def refuse_gradients(_gradient: Any) -> None:
    """Raise NotAttachedError: there is no gradient."""
    raise NotAttachedError(
        "this model is optimised, and wide's operators have no gradients; call wide.deoptimize(model) before training"
    )


def _refuse_copies(*_arguments: Any) -> Any:
    raise NotAttachedError(
        "a copy of an optimised model, or of a part of it, would run the original; call wide.deoptimize first"
    )


REFUSED_COPIES = dict.fromkeys(("__deepcopy__", "__reduce_ex__"), _refuse_copies)
"""Attributes of a module that cannot be copied or pickled."""


def stack(parameters: Sequence[Tensor]) -> Tensor:
    """Return weights [sum of N, ...] one below the other; the parameters become views of them.

    What is stacked already stays where it is, so memory holds the weights once.
    """
    first, sizes = parameters[0].detach(), [parameter.shape[0] for parameter in parameters]
    if len(parameters) == 1:
        return first
    if _lie_together(parameters):
        return first.as_strided((sum(sizes), *first.shape[1:]), first.stride(), first.storage_offset())
    both = torch.cat([parameter.detach() for parameter in parameters])
    for parameter, piece in zip(parameters, both.split(sizes), strict=True):
        parameter.data = piece
    return both


def _lie_together(parameters: Sequence[Tensor]) -> bool:
    """Return whether each parameter follows the one before it in the same storage."""
    place = parameters[0].data_ptr()
    storage = parameters[0].untyped_storage().data_ptr()
    for parameter in parameters:
        if not parameter.is_contiguous() or parameter.untyped_storage().data_ptr() != storage:
            return False
        if parameter.data_ptr() != place:
            return False
        place += parameter.nbytes
    return True
