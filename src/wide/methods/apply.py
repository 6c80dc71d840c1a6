"""Run one row of the benchmark on a live model, whatever its method: decide or train, attach, measure, record; LoRA."""

import dataclasses
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from wide.config import ObjectiveConfig, RecoverConfig, StageConfig
from wide.data.batches import TokenBlocks
from wide.errors import NotAttachedError
from wide.evaluation.inference import SkipMeter, model_device
from wide.methods.catalogue import Kind, Match, Method
from wide.methods.method import Decision, Target, dense_plan
from wide.methods.routed import Routing, train
from wide.models.attach import attach, attachment, detach, is_attached
from wide.models.cost import Sparsity, static_sparsity
from wide.models.discovery import discover
from wide.models.observe import forward_without_head, judging
from wide.training.modes import own_randomness
from wide.training.stages import recover

PROVENANCE = "method"
"""Key of the report in an attachment's provenance."""
# Where a number is a choice of the machine or of chance, not of the method.
_FREE = frozenset(
    {
        "seed",
        "micro_batch_size",
        "search_batch_size",
        "gradient_checkpointing",
        "compile",
        "checkpoint_every",
        "copies_folder",
        # What the row's own sentences tell, because the default is not the original's.
        "penalty",
        "propagation",
    }
)
# Of the loss: what no original has.
_EXTRAS = ("distillation", "ramp", "smoothing")
_MEASURED_TOKENS, _TOKENS_PER_FORWARD = 16_384, 4_096


@dataclass(frozen=True, kw_only=True, slots=True)
class MethodReport:
    """What a row is, and what it cost: the columns of the table beside quality. Shares lie in [0, 1].

    Args:
        method: Name of the row.
        kind: What it removes.
        target: Wanted sparsity.
        match: What the target counts.
        nominal: Unweighted mean of `attention` and `ffn`.
        attention: Mean over layers of the share of attention that is left out, in units of the method: layers, heads,
            groups of heads, dimensions of the residual stream, or weights; skip rates are measured on calibration text.
        ffn: The same of the FFN.
        linear_flops: Share of the matrix-product work of all decoder layers that is saved, K and V included.
        parameters_removed: Share of the decoder layers' parameters that are superfluous for every token; zeros count.
        kv_cache_kept: Share of the key-value cache that remains.
        tokens_forward: Calibration tokens through a forward only.
        tokens_backward: Calibration tokens through a forward with backward.
        seconds: Wall clock of deciding or training, over all parts of a resumed run, measurements left out.
        seed: Of the row.
        settings: The method's options.
        deviations: Where the row differs from the method's original, a sentence each.
        notes: JSON-ready facts of the method: scores, the order of removal, levels chosen.
    """

    method: str
    kind: Kind
    target: float
    match: Match
    nominal: float
    attention: float
    ffn: float
    linear_flops: float
    parameters_removed: float
    kv_cache_kept: float
    tokens_forward: int
    tokens_backward: int
    seconds: float
    seed: int
    settings: Mapping[str, Any]
    deviations: tuple[str, ...] = ()
    notes: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-ready dictionary."""
        return asdict(self) | {"deviations": list(self.deviations)}


def apply(
    model: nn.Module,
    method: Method,
    blocks: TokenBlocks,
    target: Target,
    settings: Any = None,
    *,
    stage: StageConfig | None = None,
    objective: ObjectiveConfig | None = None,
    output: Path | None = None,
    resume: bool = False,
    seed: int,
) -> MethodReport:
    """Let a method decide or train, and leave the model attached accordingly.

    Saving, LoRA (`recover_row`) and evaluation then work as for any attached model. If the method fails, the
    model is left as it was found.

    Args:
        model: A causal LM, nothing attached.
        method: A row of `wide.methods.catalogue`.
        blocks: Calibration text.
        target: How much to prune.
        settings: Of the method; None means the original's.
        stage: Steps, sizes and rates for methods that train routers; None means the paper's.
        objective: Loss of methods that train routers; the target comes from `target`.
        output: Folder for checkpoints of methods that train routers.
        resume: Continue from the newest checkpoint in `output`.
        seed: Of everything random; the one in `settings` or `stage` does not count.

    Raises:
        NotAttachedError: If the model carries a plan already.
        WideError: Whatever the method refuses.
    """
    if is_attached(model):
        raise NotAttachedError(
            f"this model carries a plan already; call wide.detach(model) before method {method.name}"
        )
    settings = _with_seed(method.default_settings() if settings is None else settings, seed)
    stage = dataclasses.replace(stage or StageConfig(), seed=seed)
    try:
        began = _now(model)
        with own_randomness(model_device(model)):
            torch.manual_seed(seed)
            if method.trains:
                decision = None
                asked = Routing(target=target, stage=stage, objective=objective or ObjectiveConfig())
                effort, deviations = train(
                    model, method.function(), blocks, settings, asked, output=output, resume=resume
                )
            else:
                decision = _decide(model, method, blocks, target, settings)
                effort, deviations = decision.effort, decision.deviations
                attach(model, decision.plan, tensors=decision.tensors, weights=decision.weights)
        seconds = _now(model) - began + effort.seconds_before
        sparsity = _measure(model, blocks)
        report = MethodReport(
            method=method.name,
            kind=method.kind,
            target=target.sparsity,
            match=target.match,
            nominal=sparsity.mean,
            attention=sparsity.attention,
            ffn=sparsity.ffn,
            linear_flops=sparsity.linear_flops_layers,
            parameters_removed=sparsity.parameters_removed,
            kv_cache_kept=sparsity.kv_cache_kept,
            tokens_forward=effort.tokens_forward,
            tokens_backward=effort.tokens_backward,
            seconds=seconds,
            seed=seed,
            settings=asdict(settings),
            deviations=(*deviations, *_changes(method, settings, stage, objective)),
            notes={} if decision is None else decision.notes,
        )
    except BaseException:
        if is_attached(model):
            detach(model)
        raise
    attachment(model).provenance[PROVENANCE] = report.to_json()
    return report


def recover_row(
    model: nn.Module,
    blocks: TokenBlocks,
    stage: RecoverConfig,
    *,
    output: Path | None = None,
    resume: bool = False,
    seed: int,
) -> None:
    """Train LoRA on an attached model by one recipe for all rows, stage 2 of the paper.

    Routers, where it has any, go on training toward the target of stage 1. What a static method pruned stays pruned.

    Args:
        model: A model after `apply` or `wide.load`, trained in place; all-dense plans are welcome.
        blocks: Training text.
        stage: The recipe, the same for all rows of a table.
        output: Folder for checkpoints, metrics and the adapter.
        resume: Continue from the newest checkpoint in `output`.
        seed: Of everything random; the one in `stage` does not count.

    Raises:
        NotAttachedError: If nothing is attached.
        MissingExtraError: If PEFT is not installed.
        TrainingError: If the loss is not finite.
    """
    # Routers record what they were trained to minimise; without routers there is nothing to steer.
    has_routers = "prune" in attachment(model).provenance
    objective = None if has_routers else ObjectiveConfig(sparsity=0.0, weight=0.0)
    stage = dataclasses.replace(stage, seed=seed)
    recover(model, blocks, objective=objective, stage=stage, output=output, resume=resume)


def _decide(model: nn.Module, method: Method, blocks: TokenBlocks, target: Target, settings: Any) -> Decision:
    if method.kind == "dense" or not target.sparsity:
        return Decision(plan=dense_plan(len(discover(model))))
    decision: Decision = method.function()(model, blocks, target, settings)
    return decision


def _with_seed(settings: Any, seed: int) -> Any:
    has_seed = any(entry.name == "seed" for entry in dataclasses.fields(settings))
    return dataclasses.replace(settings, seed=seed) if has_seed else settings


def _now(model: nn.Module) -> float:
    """Return the time in seconds, once the device has done what it was given."""
    device = model_device(model)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _measure(model: nn.Module, blocks: TokenBlocks) -> Sparsity:
    """Return what the attached model leaves out, on some calibration text where that depends on tokens."""
    if not attachment(model).plan.is_routed:
        return static_sparsity(model)
    meter = SkipMeter(model)
    batch_size = max(1, _TOKENS_PER_FORWARD // blocks.sequence_length)
    with judging(model), meter.watching():
        for batch in blocks.in_order(batch_size, max_blocks=max(1, _MEASURED_TOKENS // blocks.sequence_length)):
            moved = batch.to(model_device(model))
            forward_without_head(model, moved.input_ids)
            meter.add(moved.valid)
    sparsity = meter.result()
    assert sparsity is not None
    return sparsity


def _changes(method: Method, settings: Any, stage: StageConfig, objective: ObjectiveConfig | None) -> tuple[str, ...]:
    """Return a sentence on the settings that are not the original's, if any."""
    pairs = [(settings, method.default_settings())]
    if method.trains:
        pairs.append((stage, StageConfig()))
        # Its target is the row's, and the weight of some methods is their own.
        usual_loss = ObjectiveConfig()
        extras = {name: getattr(objective or usual_loss, name) for name in _EXTRAS}
        pairs.append((dataclasses.replace(usual_loss, **extras), usual_loss))
    words = [
        f"{entry.name} {value} (original: {usual})"
        for ours, originals in pairs
        for entry in dataclasses.fields(ours)
        if (value := getattr(ours, entry.name)) != (usual := getattr(originals, entry.name))
        and entry.name not in _FREE
        # Windows are read in micro-batches, which are no part of the method.
        and not (entry.name == "batch_size" and hasattr(ours, "num_windows"))
    ]
    return (f"settings: {', '.join(words)}",) if words else ()
