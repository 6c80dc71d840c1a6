"""What a model looks like while it is trained, and the way back: who is trainable, who samples, who recomputes.

Also a rehearsal of what runs until it reads text.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, NoReturn

import torch
import torch._functorch.config
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from wide.data.progress import without_bars
from wide.models.attach import attachment
from wide.models.block_spec import BlockSpec
from wide.models.gates import PENDING_NAME, Gate
from wide.models.having import having
from wide.models.router import RoutingControl
from wide.models.sharding import is_sharded
from wide.routing import LayerRouting

_CHECKPOINTING = "gradient_checkpointing"
# Kinds of layers in a model, times padded or not and the like; torch allows 8.
_GRAPHS = 64
# Parameters of a layer below which the host would be the bound: 0.5 ms of a GPU at 16,000 tokens and 6 million.
_SMALL_LAYER = 32_000_000


def trainable_parameters(model: nn.Module, *, routers: bool) -> dict[str, nn.Parameter]:
    """Return the LoRA matrices of an attached model, if any, and its routers' parameters, if wanted, by name."""
    state = attachment(model)
    wanted = set() if state.lora is None else {id(parameter) for parameter in state.lora.parameters()}
    if routers:
        wanted |= {id(parameter) for router in state.routers() for parameter in router.parameters()}
    return {name: parameter for name, parameter in model.named_parameters() if id(parameter) in wanted}


@contextmanager
def training_mode(
    model: nn.Module, *, routers: bool, gradient_checkpointing: bool, compile: bool = False, others: Sequence[Any] = ()
) -> Iterator[None]:
    """Freeze all but routers, LoRA and `others`, and put only these into training mode; all is put back afterwards.

    The base stays in evaluation mode, so that dropout it may have is off: it is frozen and has nothing to regularise.
    Without `routers` they decide as at inference. Layers are recomputed in the backward, and compiled, where asked for.
    """
    chosen = {id(parameter) for parameter in (*trainable_parameters(model, routers=routers).values(), *others)}
    is_half = not isinstance(forward_precision(model), nullcontext)
    with ExitStack() as stack:
        for module in model.modules():
            stack.callback(setattr, module, "training", module.training)
            # PEFT would make a float32 copy of every input, which the product turns back at once.
            if is_half and getattr(module, "cast_input_dtype_enabled", False):
                stack.enter_context(having(module, cast_input_dtype_enabled=False))
        for parameter in model.parameters():
            stack.callback(parameter.requires_grad_, parameter.requires_grad)
            parameter.requires_grad_(id(parameter) in chosen)
        model.eval()
        for name, module in model.named_modules():
            if name.endswith("lora_dropout") and attachment(model).lora is not None:
                module.train()
        for router in attachment(model).routers() if routers else ():
            router.train()
        stack.enter_context(layers_run(model, recompute=gradient_checkpointing, fuse=compile))
        yield


def forward_precision(model: nn.Module) -> AbstractContextManager[object]:
    """Return a context in which LoRA multiplies in bfloat16 beside a bfloat16 base on a GPU; its matrices stay float32.

    In float32, the two small products of LoRA would cost more than the base layer. Routers compute in float32 anyway.
    """
    weight = next(model.parameters())
    if attachment(model).lora is None or weight.dtype != torch.bfloat16 or weight.device.type != "cuda":
        return nullcontext()
    return torch.autocast(weight.device.type, dtype=torch.bfloat16)


@contextmanager
def layers_run(model: nn.Module, *, recompute: bool = False, fuse: bool = False) -> Iterator[None]:
    """Run the decoder layers of an attached model in another way wherever gradients are taken inside the block.

    Args:
        model: Checkpointing of its own that is on counts as `recompute`.
        recompute: Whether to keep a layer's input only and run the layer again in the backward, on the same noise.
        fuse: Whether `torch.compile` fuses each layer's forward and backward. Layers alike share one graph; small ones
            that are not recomputed and have no LoRA are one graph together, replayed as CUDA graphs, because starting
            each kernel takes the host longer than the GPU needs for it. Shapes are compiled one by one. Afterwards
            everything that was compiled in this process is forgotten, because there is a limit for graphs of one
            function.
    """
    specs, control = attachment(model).specs, attachment(model).control
    recompute = recompute or any(getattr(spec.layer, _CHECKPOINTING, False) for spec in specs)
    if not recompute and not fuse:
        yield
        return
    replays = False
    largest = max(sum(parameter.numel() for parameter in spec.layer.parameters()) for spec in specs)
    stands_in: dict[nn.Module, Callable[..., Any]]
    # Sharded layers are gathered between their graphs. With LoRA one graph of 30 layers is compiled for two to four
    # minutes, that of a layer for half a minute: more than 1000 steps win.
    if fuse and not recompute and largest < _SMALL_LAYER and not is_sharded(model) and attachment(model).lora is None:
        decoder = getattr(model, "base_model", model)
        replays = next(model.parameters()).is_cuda
        plain = decoder.forward
        # With CUDA graphs, of its backward too: launching so many small kernels takes longer than they do.
        fused = torch.compile(plain, fullgraph=True, dynamic=False, mode="reduce-overhead" if replays else None)
        stands_in = {decoder: lambda *args, **kwargs: (fused if torch.is_grad_enabled() else plain)(*args, **kwargs)}
    else:
        run = torch.compile(_run_layer, fullgraph=True, dynamic=False) if fuse else _run_layer
        stands_in = {s.layer: _in_training(control, s, run, recompute=recompute, fuse=fuse) for s in specs}
    with ExitStack() as settings:
        for spec in specs:
            settings.enter_context(having(spec.layer, **{_CHECKPOINTING: False}))
        if fuse:
            settings.callback(torch.compiler.reset)
            settings.enter_context(torch._dynamo.config.patch(recompile_limit=_GRAPHS))
            # Its advice is not for routers, whose small float32 products are meant.
            settings.enter_context(warnings.catch_warnings())
            warnings.filterwarnings("ignore", message="TensorFloat32 tensor cores")
            # What routers read is made again from the stream before the norm, rather than kept beside it.
            settings.enter_context(torch._functorch.config.patch(ban_recompute_materialized_backward=False))
        for module, forward in stands_in.items():
            settings.enter_context(having(module, forward=forward))
        for parameter in model.parameters():
            if replays and parameter.requires_grad:
                # The next replay writes where this one's gradients lie, and steps may add up several.
                settings.callback(parameter.register_hook(torch.clone).remove)
        yield


def _in_training(
    control: RoutingControl, spec: BlockSpec, run: Callable[..., Any], *, recompute: bool, fuse: bool
) -> Callable[..., Any]:
    """Return a layer's forward that goes through `run` where gradients are taken."""
    layer, plain = spec.layer, spec.layer.forward
    # Something else may have taken the forward's place before, such as a move between devices.
    replaced = vars(layer).get("forward")
    pending = [getattr(part.module, PENDING_NAME, None) for _, part in spec.sublayers()]
    gates: list[Gate] = [gate for gate in pending if gate is not None]

    def forward(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return plain(*args, **kwargs)
        if fuse and not args[0].requires_grad:
            # Before the first layer nothing has a gradient, and that would be a graph of its own.
            args = (args[0].detach().requires_grad_(), *args[1:])
        # What hooks outside have shown to the gates, which take it once, and what this thread wants of the routers.
        residuals, wanted = [gate.residual.value for gate in gates], dict(vars(control))
        again: dict[str, Any] = {}

        def once(*args: Any, **kwargs: Any) -> Any:
            for gate, residual in zip(gates, residuals, strict=True):
                gate.residual.value = residual
            with having(control, **again):
                return run(layer, replaced, control, *args, **kwargs)

        if recompute:
            output, attention, ffn = checkpoint(once, *args, use_reentrant=False, **kwargs)
        else:
            output, attention, ffn = once(*args, **kwargs)
        # A layer that is recomputed runs in a thread of autograd on GPUs, or in that of the caller's backward.
        again.update(wanted)
        if control.observed is not None:
            seen = control.observed[spec.index]
            seen.attention, seen.ffn = attention, ffn
        return output

    return forward


def _run_layer(
    layer: nn.Module, replaced: Callable[..., Any] | None, control: RoutingControl, *args: Any, **kwargs: Any
) -> tuple[Any, Tensor | None, Tensor | None]:
    """Return a layer's output and the masks of its attention and FFN.

    The masks are outputs like any other, and nothing here depends on the layer's number: so all layers share a graph,
    and a layer that runs again notes nothing twice.
    """
    seen = control.seen = LayerRouting()
    try:
        output = type(layer).forward(layer, *args, **kwargs) if replaced is None else replaced(*args, **kwargs)
    finally:
        # A layer that runs again is left in the middle, as soon as all is there that the backward asks for.
        control.seen = None
    return output, seen.attention, seen.ffn


class _TextIsReadError(Exception):
    """Raised in the place of the first embedding."""


@contextmanager
def rehearsal(model: Any) -> Iterator[None]:
    """Leave the block quietly where the model would embed its first tokens.

    What raises before that does so as ever; layers may be probed on numbers of their own. Whatever runs inside must
    take back on an exception what it changed. Nothing is compiled, and no progress bar is shown.
    """
    # What FSDP begins in the forward of the whole model it must be able to end.
    place = model if is_sharded(model) else model.get_input_embeddings()
    try:
        with (
            place.register_forward_pre_hook(_stop, prepend=True),
            # A compiled forward would not let the exception through.
            torch.compiler.set_stance("force_eager"),
            without_bars(),
        ):
            yield
    except _TextIsReadError:
        return


def _stop(_module: object, _args: object) -> NoReturn:
    raise _TextIsReadError
