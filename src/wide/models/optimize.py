"""Turn a routed model into one that runs wide's operators, and back."""

from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from wide.errors import NotAttachedError, UnsupportedModelError
from wide.models.attach import Attachment, attachment
from wide.models.block_spec import AttentionSpec, BlockSpec, FeedForwardSpec
from wide.models.fused import Execution, FusedAttention, FusedFeedForward
from wide.models.gates import router_of
from wide.models.router import Prefill
from wide.plan import Routed

ModelT = TypeVar("ModelT", bound=nn.Module)
_ACTIVATIONS = {
    "SiLUActivation": "silu",
    "SiLU": "silu",
    "GELUTanh": "gelu_tanh",
    "ReLUSquaredActivation": "relu2",
}
_PROBE_ROWS = 3


def optimize(model: ModelT, *, backend: str = "triton", execution: Execution | None = None) -> ModelT:
    """Let every routed half of an attached model run its fused operators, in place, and return the same object.

    The outputs are those of the masked model; `generate`, caches and evaluation keep working. Training needs the
    masked form: call `deoptimize` first.

    Args:
        model: An attached model in evaluation mode, LoRA merged, with plain linear layers.
        backend: 'triton', or 'torch' for the reference operators on any device.
        execution: Which operator runs at which sizes; None takes the defaults with `backend`.

    Raises:
        NotAttachedError: If the model has no routers, is optimised already, is in training mode, or has unmerged LoRA.
        UnsupportedModelError: If a layer is quantised or sharded, or its FFN is not the standard one.
    """
    state = attachment(model)
    if state.fused:
        raise NotAttachedError("this model is optimised already; call wide.deoptimize(model) first")
    if model.training:
        raise NotAttachedError("fused execution is for inference; call model.eval() first")
    if state.lora is not None and not state.lora.merged:
        raise NotAttachedError("merge LoRA first: wide.merge_lora(model)")
    execution = execution or Execution(backend=backend)
    fused = [_fuse(spec, state, index, execution) for index, spec in enumerate(state.specs)]
    for attention, ffn in fused:
        if attention is not None:
            attention.router.fused = attention
            attention.spec.query.forward = attention.query  # type: ignore[method-assign]
            attention.spec.output.forward = attention.output  # type: ignore[method-assign]
        if ffn is not None:
            ffn.spec.module.forward = ffn.__call__  # type: ignore[method-assign]
    state.fused = True
    state.handles_fused = [model.register_forward_pre_hook(_note_prefill, with_kwargs=True)]
    return model


def deoptimize(model: ModelT) -> ModelT:
    """Go back to dense layers followed by masks, in place, and return the same object.

    Raises:
        NotAttachedError: If the model has no routers or is not optimised.
    """
    state = attachment(model)
    if not state.fused:
        raise NotAttachedError("this model is not optimised")
    for spec, layer in zip(state.specs, state.plan.layers, strict=True):
        if isinstance(layer.attention, Routed):
            router_of(spec.attention.module).fused = None
            # The class's own forward shows again once the instance attribute is gone.
            del spec.attention.query.forward
            del spec.attention.output.forward
        if isinstance(layer.ffn, Routed) and spec.ffn is not None:
            del spec.ffn.module.forward
    for handle in state.handles_fused:
        handle.remove()
    state.handles_fused = []
    state.fused = False
    state.control.prefill = None
    return model


def _fuse(
    spec: BlockSpec, state: Attachment, index: int, execution: Execution
) -> tuple[FusedAttention | None, FusedFeedForward | None]:
    layer = state.plan.layers[index]
    attention, ffn = None, None
    if isinstance(layer.attention, Routed):
        for linear in (spec.attention.query, spec.attention.output):
            _require_plain(index, linear)
        attention = FusedAttention(spec.attention, router_of(spec.attention.module), execution)
    if isinstance(layer.ffn, Routed) and spec.ffn is not None:
        for part in (spec.ffn.up, spec.ffn.gate, spec.ffn.down):
            if part is not None:
                _require_plain(index, part)
        ffn = FusedFeedForward(spec.ffn, router_of(spec.ffn.module), _activation(index, spec.ffn), execution)
        _require_standard(index, ffn, spec.hidden_size)
    return attention, ffn


def _require_plain(index: int, linear: nn.Module) -> None:
    weight = getattr(linear, "weight", None)
    if type(linear) is not nn.Linear or type(weight) is not nn.Parameter or not weight.is_floating_point():
        raise UnsupportedModelError(
            f"layer {index}: {type(linear).__name__} with a {type(weight).__name__} weight is not a plain linear layer; "
            "quantised, sharded and LoRA-wrapped layers cannot run fused (merge LoRA, or load the model unquantised)"
        )


def _activation(index: int, spec: FeedForwardSpec) -> str:
    name = type(spec.activation).__name__
    if name not in _ACTIVATIONS:
        raise UnsupportedModelError(
            f"layer {index}: the activation {name} has no fused kernel; those that have: {sorted(_ACTIVATIONS)}"
        )
    return _ACTIVATIONS[name]


def _require_standard(index: int, ffn: FusedFeedForward, hidden_size: int) -> None:
    """Compare the module's own forward with the standard formula on a few random rows, everything executing."""
    down: Any = ffn.spec.down
    probe = torch.randn(1, _PROBE_ROWS, hidden_size, generator=torch.Generator().manual_seed(0))
    probe = probe.to(device=down.weight.device, dtype=down.weight.dtype)
    router = ffn.router
    with torch.no_grad():
        wanted = ffn.original(probe)
        router.mask = torch.ones(1, _PROBE_ROWS, router.num_groups, dtype=torch.bool, device=probe.device)
        always_dense = FusedFeedForward(
            ffn.spec, router, ffn.activation, replace(ffn.execution, min_rows=1 << 30, backend="torch")
        )
        found = always_dense(probe)
    error = (found.float() - wanted.float()).norm() / wanted.float().norm().clamp_min(1e-12)
    if not error < 2e-2:
        raise UnsupportedModelError(
            f"layer {index}: {type(ffn.spec.module).__name__} does not compute down(act(gate(x)) * up(x)); its output "
            f"differs by {float(error):.1%}, so it cannot run fused"
        )


def _note_prefill(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Before a forward over several tokens, note how many are cached and where padded sequences start."""
    control = attachment(model).control
    ids = kwargs.get("input_ids", args[0] if args else None)
    ids = kwargs.get("inputs_embeds") if ids is None else ids
    if ids is None or ids.shape[1] == 1 or torch.compiler.is_compiling():
        return
    if ids.is_cuda and torch.cuda.is_current_stream_capturing():
        # A captured forward keeps what the capturing runtime has set; reading the device is not allowed here.
        return
    valid, cache = kwargs.get("attention_mask"), kwargs.get("past_key_values")
    if valid is not None and (not isinstance(valid, Tensor) or valid.dim() != 2):
        # A mask of the caller's own making: only the dense attention function knows what to do with it.
        control.prefill = None
        return
    starts = None
    if valid is not None and not bool(valid.all()):
        starts = valid.to(torch.int32).argmax(-1).to(torch.int32)
    control.prefill = Prefill(0 if cache is None else int(cache.get_seq_length()), starts)
