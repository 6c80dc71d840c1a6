r"""SliceGPT: the residual stream lives in a subspace of its principal directions, chosen anew for every sublayer.

The original rotates the weights into the bases and cuts them. With bases B of D' orthonormal columns, that computes

    z_0 = embedding B_0,    z' = z B^T B' + out(z) B'

where `out` is a sublayer whose input weights were multiplied by B and whose norms divide by the original D. With `x = z
B^T` and P = B B^T, because |x| = |z| and a scale-free RMSNorm commutes with the rotation, that is

    x_0 = embedding P_0,    x' = (x + out(x)) P'

the untouched model with its stream projected: what is decided here is bases, no weight. The last FFN is not cut.

Source: Ashkboos et al., "SliceGPT: Compress Large Language Models by Deleting Rows and Columns", ICLR 2024.
"""

from bisect import bisect_left
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from wide.data.batches import TokenBlocks
from wide.data.progress import progress
from wide.errors import ConfigError
from wide.materialisation.stream import norm_scales
from wide.methods.calibration import calibration_windows
from wide.methods.catalogue import SliceGPTConfig
from wide.methods.layer_runner import LayerRunner
from wide.methods.method import Decision, Effort, Target, dense_plan, linear_work
from wide.methods.second_order import GramAccumulator
from wide.models.block_spec import BlockSpec, feed_forward
from wide.models.discovery import discover
from wide.models.observe import judging
from wide.models.plan_check import check_plan
from wide.models.stream import project
from wide.plan import Plan, Stream

_DEVIATIONS = (
    "calibrated on the benchmark's corpus, the original on WikiText-2 or Alpaca",
    "the mean of each embedding is not subtracted: under RMSNorm that would change the model's function",
    "no random orientation of the kept directions: it has no effect on the function",
)


def decide(model: nn.Module, blocks: TokenBlocks, target: Target, settings: SliceGPTConfig) -> Decision:
    """Decide the subspaces of the stream.

    Under match='nominal' the sparsity is the slicing fraction; under 'linear_flops' the width is the one whose removed
    work, shortcut products included, comes closest to the target. Raises UnsupportedModelError, with the part, if the
    model is not a chain of `x + sublayer(RMSNorm(x))`, and ConfigError if no dimension would be left.
    """
    specs = discover(model)
    kept = kept_dimensions(specs, target, settings.round_to)
    plan = _plan(specs, kept)
    # Before there are bases: on the meta device only the structure is looked at.
    check_plan(plan, specs, {name: torch.empty(size, device="meta") for name, size in plan.tensor_shapes().items()})
    for spec in specs:
        norm_scales(spec)
    ids = calibration_windows(blocks, settings)
    tensors, dropped = stream_bases(model, specs, ids, kept=kept, batch_size=settings.batch_size)
    return Decision(
        plan=plan,
        tensors=tensors,
        # Every layer runs to its middle and from there to its end, once each.
        effort=Effort(tokens_forward=ids.numel()),
        notes={
            "slicing_fraction": 1.0 - kept / specs[0].hidden_size,
            "removed_of_layers": removed_share(specs, kept),
            "dropped_energy": dropped,
        },
        deviations=_DEVIATIONS,
    )


def removed_share(specs: Sequence[BlockSpec], kept: int) -> float:
    """Return the share of all layers' matrix weights that goes with a stream of `kept` dimensions, shortcuts included.

    The last FFN writes all D dimensions, and its shortcut too.
    """
    removed, total = linear_work(specs, _plan(specs, kept))
    return removed / total


def _plan(specs: Sequence[BlockSpec], kept: int) -> Plan:
    return Plan(dense_plan(len(specs)).layers, Stream(width=specs[0].hidden_size, kept=kept))


def kept_dimensions(specs: Sequence[BlockSpec], target: Target, round_to: int) -> int:
    """Return the width of the sliced stream, D'; raises ConfigError if `round_to` leaves none."""
    width = specs[0].hidden_size
    # The small addition keeps a product such as 0.9 * 640 from falling below the integer that it means.
    largest = int((1.0 - target.sparsity) * width + 1e-6) if target.match == "nominal" else width
    choices = list(range(round_to, largest + 1, round_to))
    if not choices:
        raise ConfigError(
            f"a sparsity of {target.sparsity} leaves {largest} of {width} dimensions, less than round_to = {round_to}; "
            f"lower the sparsity or round_to"
        )
    if target.match == "nominal":
        return choices[-1]
    # The wider the stream, the less is removed.
    place = bisect_left(choices, -target.sparsity, key=lambda kept: -removed_share(specs, kept))
    near = choices[max(place - 1, 0) : place + 1]
    return min(near, key=lambda kept: abs(removed_share(specs, kept) - target.sparsity))


def stream_bases(
    model: nn.Module, specs: Sequence[BlockSpec], ids: Tensor, *, kept: int, batch_size: int
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Return the bases of the stream after the embedding and after every sublayer but the last.

    Each is the span of the leading principal directions (of the uncentred second moment, float64) of the stream as the
    layers before it leave it, cut already. Damping, which the original adds, moves no direction and is left out.
    Returned are bases, float32 `[D, D']` on the CPU, and the share of the energy that each drops, by their names in a
    plan.
    """
    tensors: dict[str, Tensor] = {}
    dropped: dict[str, float] = {}

    def cut(signals: list[Tensor], name: str) -> None:
        basis, dropped[name] = principal_basis(signals, kept)
        tensors[name] = basis.float().cpu()
        for index, signal in enumerate(signals):
            signals[index] = project(signal, tensors[name]).to(signal.dtype)

    with judging(model):
        runner = LayerRunner(model, specs, ids, batch_size=batch_size)
        cut(runner.inputs, "stream.embedding")
        for spec in progress(specs, title="slicegpt: layers", unit="layer"):
            ffn = feed_forward(spec)
            assert ffn.pre_norm is not None
            for batch in range(len(runner.inputs)):
                runner.inputs[batch] = runner.input_inside(spec.index, batch, ffn.pre_norm)
            cut(runner.inputs, f"layers.{spec.index}.attention.basis")
            if spec.index == len(specs) - 1:
                break
            for batch, stream in enumerate(runner.inputs):
                runner.inputs[batch] = stream + ffn.module(ffn.pre_norm(stream))
            cut(runner.inputs, f"layers.{spec.index}.ffn.basis")
    return tensors, dropped


def principal_basis(signals: Sequence[Tensor], kept: int) -> tuple[Tensor, float]:
    """Return the leading D' principal directions of signals `[..., D]`, uncentred, and the energy outside their span.

    They are orthonormal columns by descending energy, float64 `[D, D']`; the energy is a share.
    """
    moments = GramAccumulator(signals[0].shape[-1], device=signals[0].device, dtype=torch.float64)
    for signal in signals:
        moments.add(signal)
    energies, directions = torch.linalg.eigh(moments.matrix)
    outside = float(energies[: len(energies) - kept].clamp(min=0.0).sum() / energies.sum())
    return directions.flip(1)[:, :kept].contiguous(), outside
