"""Figures of a run: perplexity, sparsity by layer, what routers do with a text, and the course of training."""

from collections.abc import Iterator
from itertools import islice
from typing import Any

from wide.report.figure import LOOKS, Row, figures
from wide.report.selection import NAMES, SUBLAYERS, Selection

_STAGES = ("stage 1", "stage 1+2", "pruned", "pruned + LoRA")
_MOST_TOKENS = 48  # as figures.yaml says
_COURSE: dict[str, list[str]] = LOOKS["course"]
"""Metric of training -> panel and line."""


def _perplexities(run: Selection) -> list[Row]:
    values = [(subject, run.number(subject, "token_perplexity")) for subject in run.subjects()]
    return [
        {"model": NAMES[subject], "token_perplexity": value, "words": f"{value:.1f}"}
        for subject, value in values
        if value is not None
    ]


def _layers(run: Selection) -> list[Row]:
    subject = run.last_subject_with(*(f"sparsity.{name}" for name in SUBLAYERS))
    return [
        {"model": subject, "half": SUBLAYERS[name], "layer": layer, "skipped_share": rate}
        for name in SUBLAYERS
        for layer, rate in run.by_layer(subject or "", f"sparsity.{name}")
    ]


def _training(run: Selection) -> list[Row]:
    rows: list[Row] = []
    offset = 0
    for stage in _STAGES:
        losses = run.by_step(stage, "training.lm_loss")
        targets, measured = (run.by_step(stage, f"training.sparsity.{name}") for name in ("target", "mean"))
        for metric, (panel, name) in _COURSE.items():
            # LoRA on a static plan has no target.
            if metric in ("sparsity.mean", "sparsity.target") and not (targets and targets[-1][1] and measured):
                continue
            scale = 100.0 if metric.startswith("sparsity") else 1.0
            rows += [
                {"stage": stage, "step": offset + step, "panel": panel, "metric": name, "value": scale * value}
                for step, value in (run.by_step(stage, f"training.{metric}") if losses else ())
            ]
        offset += losses[-1][0] + 1 if losses else 0
    return rows


def _routed(run: Selection, name: str) -> Iterator[tuple[str, int, Any]]:
    """Yield sublayer, layer and content of the records of the last model whose routing was measured."""
    subject = run.last_subject_with(*(f"routing.{sublayer}.{name}" for sublayer in SUBLAYERS))
    for sublayer in SUBLAYERS if subject else ():
        for layer, content in run.by_layer(subject or "", f"routing.{sublayer}.{name}"):
            yield SUBLAYERS[sublayer], layer, content


def _tokens(run: Selection) -> list[Row]:
    subject = run.last_subject_with("routing.sample")
    sample = run.content(subject, "routing.sample") if subject else {}
    return [
        {
            "half": name,
            "position": place,
            # A dollar sign would begin a formula.
            "token": f"{place} " + (token.strip().replace("$", r"\$")[:14] or {"\n": "↵"}.get(token[:1], "␣")),
            "layer": layer,
            "share_of_groups": None if share is None else share / 100,
        }
        for key, name in SUBLAYERS.items()
        for place, (token, shares) in enumerate(
            islice(zip(sample.get("tokens", ()), sample.get(key, ()), strict=False), _MOST_TOKENS)
        )
        for layer, share in enumerate(shares)
    ]


def _patterns(run: Selection) -> list[Row]:
    return [
        {"half": name, "layer": layer, "groups": found["groups"], "group_or_bin": place, "share_of_tokens": share}
        for name, layer, found in _routed(run, "by_group")
        for place, share in enumerate(found["shares"])
    ]


def _correlations(run: Selection) -> list[Row]:
    pairs = {"group_correlation": "groups apart, one token", "token_correlation": "tokens apart, one group"}
    subject = run.last_subject_with(*(f"routing.{each}.{name}" for each in SUBLAYERS for name in pairs)) or ""
    return [
        {"between": words, "half": SUBLAYERS[sublayer], "distance": distance, "phi": value}
        for name, words in pairs.items()
        for sublayer in SUBLAYERS
        for distance, value in enumerate(run.content(subject, f"routing.{sublayer}.{name}") or (), 1)
    ]


def _matrices(run: Selection) -> list[Row]:
    return [
        {"panel": f"{name}, layer {layer}", "group": first, "other_group": second, "phi": value}
        for name, layer, found in _routed(run, "group_matrix")
        for first, row in zip(found["groups"], found["phi"], strict=True)
        for second, value in zip(found["groups"], row, strict=True)
    ]


def _stability(run: Selection) -> list[Row]:
    chance = {(name, layer): share for name, layer, share in _routed(run, "same_by_chance")}
    subject = run.last_subject_with(*(f"routing.{sublayer}.same_as_previous" for sublayer in SUBLAYERS)) or ""
    flips = {SUBLAYERS[each]: run.number(subject, f"routing.{each}.flips_bfloat16") for each in SUBLAYERS}
    return [
        {
            "half": name,
            "layer": layer,
            "same_as_previous": share,
            "same_by_chance": chance.get((name, layer)),
            "flips_bfloat16": flips[name],
        }
        for name, layer, share in _routed(run, "same_as_previous")
    ]


FIGURES = figures(
    "run",
    {
        "perplexity": _perplexities,
        "layers": _layers,
        "tokens": _tokens,
        "group-patterns": _patterns,
        "correlation": _correlations,
        "group-correlation": _matrices,
        "stability": _stability,
        "training": _training,
    },
)
"""All figures of a run, in the order of the page; `wide.evaluation.routing_stats` measures what routers do."""
