"""Run one row of the benchmark on a live model, whatever its method: decide or train, attach, measure, record."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from wide.config import ObjectiveConfig, StageConfig
from wide.data.batches import TokenBlocks
from wide.errors import NotAttachedError
from wide.methods.catalogue import Method
from wide.methods.method import Decision, Target, dense_plan
from wide.methods.routed import Routing, train
from wide.models.attach import attach, attachment, detach, is_attached
from wide.models.cost import SkipCounter, static_sparsity
from wide.models.discovery import discover
from wide.models.observe import forward_without_head, judging, model_device, now, observe, own_randomness
from wide.models.sharding import require_unsharded

PROVENANCE = "method"
"""Key in an attachment's provenance of what `apply` returns."""
SHARES = {
    **{name: name for name in ("attention", "ffn", "parameters_removed", "kv_cache_kept")},
    **{"nominal": "mean", "linear_flops": "linear_flops_layers"},
}
"""Name of a share in such a report -> field of `Sparsity`."""
# Where a number is a choice of the machine or of chance, not of the method; and what the row's own sentences tell,
# because the default is not the original's.
_FREE = {"seed", "micro_batch_size", "search_batch_size", "gradient_checkpointing", "compile", "checkpoint_every"}
_FREE |= {"propagation"}
# Of the loss: what no original has.
_EXTRAS = ("distillation", "smoothing")
_MEASURED_TOKENS, _TOKENS_PER_FORWARD = 65_536, 4_096
_TIMED_TOKENS = 512


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
) -> dict[str, Any]:
    """Let a method decide or train, and leave the model attached accordingly; if it fails, as it was found.

    Return what the row is and what it cost, JSON-ready. Its shares are those of `Sparsity` in units of the method, skip
    rates measured on calibration text; its seconds are those of deciding or training, over all parts of a resumed run.

    Args:
        settings: Of the method; None means the original's.
        stage: Steps, sizes and rates for methods that train routers; None means the paper's.
        objective: Loss of methods that train routers; the target comes from `target`.
        seed: Of everything random; the one in `settings` or `stage` does not count.

    Raises:
        NotAttachedError: If the model carries a plan already.
        WideError: Whatever the method refuses; a sharded model, where neither routers nor gates are trained.
    """
    if is_attached(model):
        raise NotAttachedError(
            f"this model carries a plan already; call wide.detach(model) before method {method.name}"
        )
    settings = method.settings() if settings is None else settings
    if hasattr(settings, "seed"):
        settings = dataclasses.replace(settings, seed=seed)
    stage = dataclasses.replace(stage or StageConfig(), seed=seed)
    try:
        began = now(model_device(model))
        with own_randomness(model_device(model), seed):
            if method.trains:
                notes: Mapping[str, Any] = {}
                asked = Routing(target=target, stage=stage, objective=objective or ObjectiveConfig())
                effort, deviations = train(
                    model, method.function(), blocks, settings, asked, output=output, resume=resume
                )
            else:
                decision = _decide(model, method, blocks, target, settings)
                effort, deviations, notes = decision.effort, decision.deviations, decision.notes
                attach(model, decision.plan, tensors=decision.tensors, weights=decision.weights)
        seconds = now(model_device(model)) - began + effort.seconds_before
        report = {
            "method": method.name,
            "kind": method.kind,
            "target": target.sparsity,
            "match": target.match,
            **shares_of(model, blocks),
            "tokens_forward": effort.tokens_forward,
            "tokens_backward": effort.tokens_backward,
            "seconds": seconds,
            "seed": seed,
            "settings": dataclasses.asdict(settings),
            "deviations": [*deviations, *_changes(method, settings, stage, objective)],
            "notes": notes,
            "text": blocks.name,
            "split": blocks.split,
        }
    except BaseException:
        if is_attached(model):
            detach(model)
        raise
    attachment(model).provenance[PROVENANCE] = report
    return report


def expected_time(
    model: nn.Module, method: Method, blocks: TokenBlocks, sparsity: float, settings: Any, stage: StageConfig
) -> str:
    """Return in words about how long a method will run, by two forwards that are run now; empty where it cannot say.

    Gradients count as two forwards. What solves for weights (tyr, slicegpt) needs time on top.
    """
    if method.trains:
        tokens = 3.0 * stage.num_tokens
    elif hasattr(settings, "num_tokens"):
        tokens = settings.num_tokens(len(discover(model)), sparsity)
    else:
        return ""
    ids = blocks.batch([0]).input_ids[:, :_TIMED_TOKENS].to(model_device(model))
    with judging(model):
        for _ in range(2):
            began = now(ids.device)
            forward_without_head(model, ids)
            seconds = (now(ids.device) - began) * tokens / ids.numel()
    unit, size = next((each for each in (("h", 3600), ("min", 60)) if seconds >= 2 * each[1]), ("s", 1))
    return f"about {max(seconds / size, 1):.0f} {unit}"


def _decide(model: nn.Module, method: Method, blocks: TokenBlocks, target: Target, settings: Any) -> Decision:
    if method.kind == "dense":
        return Decision(plan=dense_plan(len(discover(model))))
    if not method.takes_sharded:
        require_unsharded(model, f"method {method.name}")
    return method.function()(model, blocks, target, settings)


def shares_of(model: nn.Module, blocks: TokenBlocks) -> dict[str, float]:
    """Return what the attached model leaves out now, as a report has it.

    Where that depends on tokens, it is measured on calibration text from all over.
    """
    if attachment(model).plan.is_routed:
        counter = SkipCounter(model)
        batch_size = max(1, _TOKENS_PER_FORWARD // blocks.sequence_length)
        with judging(model), observe(model) as routing:
            # Neighbouring blocks may be of one document.
            count = min(len(blocks), max(1, _MEASURED_TOKENS // blocks.sequence_length))
            places = range(0, count * (len(blocks) // count), len(blocks) // count)
            for begin in range(0, count, batch_size):
                moved = blocks.batch(places[begin : begin + batch_size]).to(model_device(model))
                forward_without_head(model, moved.input_ids)
                counter.add(routing, moved.valid)
        found = counter.result()
    else:
        found = static_sparsity(model)
    return {name: getattr(found, field) for name, field in SHARES.items()}


def _changes(method: Method, settings: Any, stage: StageConfig, objective: ObjectiveConfig | None) -> tuple[str, ...]:
    pairs = [(settings, method.settings())]
    if method.trains:
        pairs.append((stage, StageConfig()))
        # Its target is the row's, and the weight of some methods is their own.
        usual_loss = ObjectiveConfig()
        told = _EXTRAS if hasattr(settings, "weight") else (*_EXTRAS, "weight")
        extras = {name: getattr(objective or usual_loss, name) for name in told}
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
