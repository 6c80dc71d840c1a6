"""Figures of a run, one function each; `FIGURES` lists them in the order of the page.

A function draws into an empty figure and returns the sentence that says what there is to see, for those who cannot
see it. Lines and bars differ in marker, dash or hatch as well as in colour, so that they can be told apart in grey.
"""

from collections.abc import Callable
from typing import Any

from wide.report.selection import MissingRecordsError, Selection
from wide.report.table import NAMES

# Okabe and Ito's palette, which people with any colour vision can tell apart; the order also falls in lightness.
BLUE, ORANGE, GREEN, GREY = "#0072B2", "#E69F00", "#009E73", "#707070"
HATCHES = {"dense": "", "untrained": "xx", "stage 1": "//", "stage 1+2": "..", "pruned": "//"}
FILLS = {"dense": GREY, "untrained": "#D9D9D9", "stage 1": ORANGE, "stage 1+2": BLUE, "pruned": ORANGE}

Draw = Callable[[Any, Selection], str]


def perplexity(figure: Any, run: Selection) -> str:
    """Draw the token perplexity of each measured model as bars."""
    found = [(subject, run.number(subject, "token_perplexity")) for subject in run.subjects()]
    values = [(subject, value) for subject, value in found if value is not None]
    if not values:
        raise MissingRecordsError("no record 'token_perplexity'; run the evaluation")
    axes = figure.subplots()
    numbers = [value for _, value in values]
    for place, (subject, value) in enumerate(values):
        axes.barh(place, value, color=FILLS[subject], hatch=HATCHES[subject], edgecolor="black", linewidth=0.8)
        axes.annotate(f"{value:.1f}", (value, place), xytext=(4, 0), textcoords="offset points", va="center")
    if max(numbers) > 8 * min(numbers):
        axes.set_xscale("log")
        # 1 is the perplexity of a model that is always right and sure, so bars begin there.
        axes.set_xlim(1, max(numbers) * 2.5)
    else:
        axes.set_xlim(0, max(numbers) * 1.15)
    axes.set_yticks(range(len(values)), [NAMES[subject] for subject, _ in values])
    axes.invert_yaxis()
    axes.set_xlabel("token perplexity on held-out text" + (", log scale" if axes.get_xscale() == "log" else ""))
    return "Token perplexity: " + ", ".join(f"{NAMES[s]} {v:.2f}" for s, v in values) + "."


def layer_sparsity(figure: Any, run: Selection) -> str:
    """Draw the share of skipped attention and FFN groups of each layer."""
    subject = run.last_subject_with_layers()
    if subject is None:
        raise MissingRecordsError("no record 'sparsity.attention' or 'sparsity.ffn' of a layer; run the evaluation")
    axes = figure.subplots()
    sentences = []
    for half, name, colour, style in (
        ("attention", "attention", BLUE, "o-"),
        ("ffn", "FFN", ORANGE, "s--"),
    ):
        points = run.by_layer(subject, f"sparsity.{half}")
        if points:
            axes.plot([x for x, _ in points], [100 * y for _, y in points], style, color=colour, label=name)
            sentences.append(f"{name} " + ", ".join(f"{100 * y:.0f}" for _, y in points))
    target = run.number("run", "target.sparsity")
    if target is not None:
        axes.axhline(100 * target, color="black", linestyle=":", label="target")
    axes.set_ylim(-3, 103)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_xlabel("decoder layer")
    axes.set_ylabel("skipped groups, %")
    _legend_above(axes)
    return f"Skipped groups per layer in percent after {subject}: " + "; ".join(sentences) + "."


def training_curves(figure: Any, run: Selection) -> str:
    """Draw loss, sparsity and temperature over the steps of the stages, one after the other."""
    stages = [stage for stage in ("stage 1", "stage 1+2") if run.by_step(stage, "training.lm_loss")]
    if not stages:
        raise MissingRecordsError("no record 'training.lm_loss' with steps; train with metrics on")
    panels = figure.subplots(1, 3)
    offset, begins = 0, []
    for stage in stages:
        steps = run.by_step(stage, "training.lm_loss")
        begins.append((stage, offset))
        _curve(panels[0], run, stage, "training.lm_loss", offset, BLUE, "-", "LM loss")
        _curve(panels[1], run, stage, "training.sparsity.attention", offset, BLUE, "-", "attention", scale=100)
        _curve(panels[1], run, stage, "training.sparsity.ffn", offset, ORANGE, "--", "FFN", scale=100)
        _curve(panels[1], run, stage, "training.sparsity.target", offset, "black", ":", "target", scale=100)
        _curve(panels[2], run, stage, "training.temperature", offset, BLUE, "-", "temperature")
        offset += steps[-1][0] + 1
    for axes, name in zip(panels, ("LM loss, nats per token", "skipped groups, %", "temperature"), strict=True):
        axes.set_title(name, fontsize="medium", pad=24)
        axes.set_xlabel("optimiser step")
        for _, begin in begins[1:]:
            axes.axvline(begin, color=GREY, linewidth=1)
    _legend_above(panels[1])
    first = run.by_step(stages[0], "training.lm_loss")[0][1]
    ends = ", ".join(f"{run.by_step(stage, 'training.lm_loss')[-1][1]:.2f} after {stage}" for stage in stages)
    line = " A vertical line separates the stages." if len(stages) > 1 else ""
    return f"Training loss falls from {first:.2f} to {ends}.{line}"


def _curve(
    axes: Any,
    run: Selection,
    stage: str,
    metric: str,
    offset: int,
    colour: str,
    style: str,
    name: str,
    scale: float = 1,
) -> None:
    points = run.by_step(stage, metric)
    if points:
        label = name if offset == 0 else None
        axes.plot([offset + x for x, _ in points], [scale * y for _, y in points], style, color=colour, label=label)


def _legend_above(axes: Any) -> None:
    # Above the axes a legend can hide no data.
    axes.legend(
        loc="lower center",
        bbox_to_anchor=(0.5, 1.0),
        ncols=3,
        frameon=False,
        fontsize="small",
        columnspacing=1.0,
        handlelength=1.6,
    )


FIGURES: list[tuple[str, Draw, tuple[float, float]]] = [
    ("Perplexity", perplexity, (9.0, 2.4)),
    ("Sparsity per layer", layer_sparsity, (9.0, 3.2)),
    ("Training", training_curves, (9.0, 3.2)),
]
"""Title, function, and size in inches of each figure."""
