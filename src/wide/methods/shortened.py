"""Shortened LLaMA: whole layers are left out, once, in the order of a score of each layer alone.

Source: Kim et al., "Shortened LLaMA: Depth Pruning for Large Language Models with Comparison of Retraining Methods",
2024.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from wide.data.batches import TokenBlocks
from wide.data.progress import progress
from wide.errors import ConfigError, EvaluationError, UnsupportedModelError
from wide.methods.block_gates import BlockGates, both_halves, plan_without, undefined_as_worst, whole_layers
from wide.methods.calibration import calibration_windows, json_number, num_predicted
from wide.methods.catalogue import ShortenedConfig
from wide.methods.method import Decision, Target
from wide.models.block_spec import BlockSpec
from wide.models.observe import judging, model_device
from wide.training.token_loss import token_losses

Scores = npt.NDArray[np.float64]
"""One score per layer, `[L]`; a low one means unimportant."""

# The original keeps the first 4 and the last 2 of 32 layers.
_REFERENCE_LAYERS, _PROTECTED_FIRST, _PROTECTED_LAST = 32, 4, 2


def protected_layers(num_layers: int, settings: ShortenedConfig) -> frozenset[int]:
    """Return the layers at both ends that are never removed; where not set, their number follows the depth."""
    first, last = settings.protect_first, settings.protect_last
    if first is None:
        first = max(1, round(_PROTECTED_FIRST * num_layers / _REFERENCE_LAYERS))
    if last is None:
        last = max(1, round(_PROTECTED_LAST * num_layers / _REFERENCE_LAYERS))
    return frozenset(range(min(first, num_layers))) | frozenset(range(max(num_layers - last, 0), num_layers))


def removal_order(scores: Scores) -> list[int]:
    """Return all layers, the least important first; of equals the first."""
    return [int(layer) for layer in np.argsort(scores, kind="stable")]


def removed_layers(order: Sequence[int], protected: frozenset[int], count: int) -> list[int]:
    """Return the first `count` layers of the order that are not protected; raises ConfigError if there are fewer."""
    candidates = [layer for layer in order if layer not in protected]
    if count > len(candidates):
        raise ConfigError(
            f"{count} of {len(order)} layers are to be removed, and only {len(candidates)} are not protected "
            f"(protected: {sorted(protected)}); lower the sparsity, or protect_first and protect_last"
        )
    return candidates[:count]


def perplexity_scores(gates: BlockGates) -> Scores:
    """Return the mean loss per token without each layer alone, nats, float64 `[L]`; low means unimportant.

    It orders the layers as the perplexity does, and does not overflow. A forward that broke down counts as +inf. Raises
    EvaluationError if the whole model's loss is not finite.
    """
    gates.dense_nll()
    keeps = whole_layers(~np.eye(gates.num_layers, dtype=np.bool_))
    return undefined_as_worst(gates.mean_nll(keeps, title="shortened-ppl: layers"))


def taylor_scores(gates: BlockGates) -> Scores:
    """Return for each layer the sum over its parameters of |W * dL/dW|, L the mean loss per token; float64 `[L]`.

    W * dL/dW is summed over micro-batches in float32 before the absolute value. With one micro-batch every gradient is
    dropped as soon as it was read; with more a float32 copy of all layers' parameters is held. The model is left as it
    was. Raises UnsupportedModelError if a parameter of a layer has no gradient, as quantised ones, and EvaluationError
    if a score is not finite.
    """
    model, batches = gates.model, gates.ids.split(gates.batch_size)
    device, predicted = model_device(model), num_predicted(gates.ids)
    sums: dict[Tensor, Tensor] = {}

    @torch.no_grad()
    def take(parameter: Tensor) -> None:
        assert parameter.grad is not None
        product = parameter.float() * parameter.grad.float()
        parameter.grad = None
        if len(batches) == 1:
            product = product.abs().sum(dtype=torch.float64)
        sums[parameter] = sums[parameter] + product if parameter in sums else product

    with judging(model), torch.enable_grad(), _layer_gradients(model, gates.specs, take):
        for batch in progress(batches, title="shortened-taylor: gradients", unit="backward"):
            moved = batch.to(device)
            logits = model(input_ids=moved, use_cache=False).logits
            loss, _, _ = token_losses(logits, moved.to(logits.device))
            (loss / predicted).backward()
    gates.effort.tokens_backward += gates.ids.numel()
    totals = {parameter: float(total.abs().sum(dtype=torch.float64)) for parameter, total in sums.items()}
    scores = np.array([sum(totals.get(p, 0.0) for p in spec.layer.parameters()) for spec in gates.specs])
    if not np.isfinite(scores).all():
        bad = int(np.flatnonzero(~np.isfinite(scores))[0])
        raise EvaluationError(f"the Taylor score of layer {bad} is {scores[bad]}, not finite: try bfloat16 or float32")
    return scores


@contextmanager
def _layer_gradients(model: nn.Module, specs: Sequence[BlockSpec], take: Callable[[Tensor], None]) -> Iterator[None]:
    """Let exactly the layers' parameters have gradients, each shown to `take`; put everything back afterwards."""
    for spec in specs:
        for name, parameter in spec.layer.named_parameters():
            if not parameter.is_floating_point():
                raise UnsupportedModelError(
                    f"layer {spec.index}: {name} is {parameter.dtype} and has no gradient, which the Taylor score "
                    "needs; load the model in bfloat16 or float32"
                )
    with ExitStack() as stack:
        for parameter in model.parameters():
            stack.callback(setattr, parameter, "grad", parameter.grad)
            stack.callback(parameter.requires_grad_, parameter.requires_grad)
            parameter.grad = None
            parameter.requires_grad_(False)
        for parameter in (parameter for spec in specs for parameter in spec.layer.parameters()):
            stack.callback(parameter.requires_grad_(True).register_post_accumulate_grad_hook(take).remove)
        yield


def decide_by_perplexity(model: nn.Module, blocks: TokenBlocks, target: Target, settings: ShortenedConfig) -> Decision:
    """Decide which layers to leave out by the loss without each; both measures of the target are the same here.

    Raises ConfigError if more layers are to be removed than are not protected, or the text is too short, and
    EvaluationError if the unpruned model's loss is not finite.
    """
    return _decide(model, blocks, target, settings, perplexity_scores)


def decide_by_taylor(model: nn.Module, blocks: TokenBlocks, target: Target, settings: ShortenedConfig) -> Decision:
    """Decide which layers to leave out by the Taylor scores; errors are ConfigError and those of `taylor_scores`."""
    decision = _decide(model, blocks, target, settings, taylor_scores)
    dtype = next(model.parameters()).dtype
    if dtype == torch.float32:
        return decision
    blurred = f"gradients in the model's {dtype}, the original's in float32; products and sums in float32"
    return dataclasses.replace(decision, deviations=(*decision.deviations, blurred))


def _decide(
    model: nn.Module,
    blocks: TokenBlocks,
    target: Target,
    settings: ShortenedConfig,
    score: Callable[[BlockGates], Scores],
) -> Decision:
    gates = BlockGates(model, calibration_windows(blocks, settings), settings.batch_size)
    protected = protected_layers(gates.num_layers, settings)
    # All layers cost the same, so both measures of the target ask for the same number of them.
    count = round(target.sparsity * gates.num_layers)
    # Refused before the work, not after it.
    removed_layers(range(gates.num_layers), protected, count)
    scores = score(gates)
    order = removal_order(scores)
    removed = removed_layers(order, protected, count)
    return Decision(
        plan=plan_without(both_halves(removed), gates.num_layers),
        effort=gates.effort,
        notes={
            "removed": removed,
            "order": order,
            "scores": [json_number(value) for value in scores],
            "protected": sorted(protected),
        },
        deviations=_deviations(protected, gates.num_layers),
    )


def _deviations(protected: frozenset[int], num_layers: int) -> tuple[str, ...]:
    corpus = "calibrated on the benchmark's corpus, the original on BookCorpus"
    own = {*range(_PROTECTED_FIRST), *range(num_layers - _PROTECTED_LAST, num_layers)}
    if protected == own:
        return (corpus,)
    return corpus, (
        f"layers {', '.join(map(str, sorted(protected))) or 'none'} are protected, in the original the first "
        f"{_PROTECTED_FIRST} and the last {_PROTECTED_LAST} whatever the depth (protect_first {_PROTECTED_FIRST}, "
        f"protect_last {_PROTECTED_LAST})"
    )
