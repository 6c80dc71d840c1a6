"""Figures of a run, in the order of the page.

Lines and bars differ in marker, dash or hatch as well as in colour, so that they can be told apart in grey.
"""

from collections.abc import Iterator
from typing import Any

from wide.report.figure import Figure, Sheet, Value
from wide.report.routing_figures import ROUTING_FIGURES
from wide.report.selection import MissingRecordsError, Selection
from wide.report.style import (
    BLUE,
    GREY,
    HALF_COLOURS,
    HALF_HATCHES,
    HALF_NAMES,
    ORANGE,
    legend_above,
    whole_numbers,
)
from wide.report.table import AFTER, NAMES

HATCHES = {
    "dense": "",
    "dense + LoRA": "..",
    "untrained": "xx",
    "stage 1": "//",
    "stage 1+2": "..",
    "pruned": "//",
    "pruned + LoRA": "..",
}
FILLS = {
    "dense": GREY,
    "dense + LoRA": GREY,
    "untrained": "#D9D9D9",
    "stage 1": ORANGE,
    "stage 1+2": BLUE,
    "pruned": ORANGE,
    "pruned + LoRA": BLUE,
}
_STAGES = ("stage 1", "stage 1+2", "pruned", "pruned + LoRA")
_COURSE = ("lm_loss", "sparsity.attention", "sparsity.ffn", "sparsity.mean", "sparsity.target", "temperature")


def _perplexities(run: Selection) -> list[tuple[str, float]]:
    found = [(subject, run.number(subject, "token_perplexity")) for subject in run.subjects()]
    values = [(subject, value) for subject, value in found if value is not None]
    if not values:
        raise MissingRecordsError("no record 'token_perplexity'; run the evaluation")
    return values


def _draw_perplexity(figure: Any, run: Selection) -> str:
    values = _perplexities(run)
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


def _layers(run: Selection) -> tuple[str, dict[str, list[tuple[int, float]]]]:
    subject = run.last_subject_with_layers()
    if subject is None:
        raise MissingRecordsError("no record 'sparsity.attention' or 'sparsity.ffn' of a layer; run the evaluation")
    rates = {half: run.by_layer(subject, f"sparsity.{half}") for half in HALF_NAMES}
    return subject, {half: points for half, points in rates.items() if points}


def _draw_layers(figure: Any, run: Selection) -> str:
    subject, rates = _layers(run)
    axes = figure.subplots()
    width = 0.8 / len(rates)
    sentences = []
    for place, (half, points) in enumerate(rates.items()):
        offset = (place - (len(rates) - 1) / 2) * width
        axes.bar(
            [layer + offset for layer, _ in points],
            [100 * rate for _, rate in points],
            width,
            color=HALF_COLOURS[half],
            hatch=HALF_HATCHES[half],
            edgecolor="black",
            linewidth=0.5,
            label=HALF_NAMES[half],
        )
        sentences.append(f"{HALF_NAMES[half]} " + ", ".join(f"{100 * rate:z.0f}" for _, rate in points))
    axes.set_ylim(0, 103)
    whole_numbers(axes.xaxis)
    axes.grid(visible=False, axis="x")
    axes.set_xlabel("decoder layer")
    axes.set_ylabel("skipped groups, %")
    legend_above(axes)
    return f"Skipped groups per layer in percent {AFTER[subject]}: " + "; ".join(sentences) + "."


def _stages(run: Selection) -> Iterator[tuple[str, int]]:
    """Yield the stages that were recorded, each with the number of steps before it."""
    stages = [stage for stage in _STAGES if run.by_step(stage, "training.lm_loss")]
    if not stages:
        raise MissingRecordsError(
            "no record 'training.lm_loss' with steps; wide prune and wide recover write it while they train"
        )
    offset = 0
    for stage in stages:
        yield stage, offset
        offset += run.by_step(stage, "training.lm_loss")[-1][0] + 1


def _draw_training(figure: Any, run: Selection) -> str:
    stages = list(_stages(run))
    panels = figure.subplots(1, 3)
    for stage, offset in stages:
        _curve(panels[0], run, stage, "lm_loss", offset, BLUE, "-", "LM loss")
        _curve(panels[1], run, stage, "sparsity.attention", offset, BLUE, "-", "attention", scale=100)
        _curve(panels[1], run, stage, "sparsity.ffn", offset, ORANGE, "--", "FFN", scale=100)
        if _is_steered(run, stage):
            _curve(panels[1], run, stage, "sparsity.mean", offset, "black", "-.", "both together", scale=100)
            _curve(panels[1], run, stage, "sparsity.target", offset, "black", ":", "target of both", scale=100)
        _curve(panels[2], run, stage, "temperature", offset, BLUE, "-", "temperature")
    for axes, name in zip(panels, ("LM loss, nats per token", "skipped groups, %", "temperature"), strict=True):
        axes.set_title(name, fontsize="medium", pad=38)
        axes.set_xlabel("optimiser step")
        for _, begin in stages[1:]:
            axes.axvline(begin, color=GREY, linewidth=1)
    legend_above(panels[1], columns=2)
    first = run.by_step(stages[0][0], "training.lm_loss")[0][1]
    ends = ", ".join(f"{run.by_step(stage, 'training.lm_loss')[-1][1]:.2f} {AFTER[stage]}" for stage, _ in stages)
    line = " A vertical line separates the stages." if len(stages) > 1 else ""
    steered = any(_is_steered(run, stage) for stage, _ in stages)
    both = " The target is one of both halves together, which count as it counts them: alike, or by their work."
    return f"Training loss goes from {first:.2f} to {ends}.{line}{both if steered else ''}"


def _is_steered(run: Selection, stage: str) -> bool:
    """Return whether a stage had a target, and what it counts was recorded; LoRA on a static plan has none."""
    targets = run.by_step(stage, "training.sparsity.target")
    return bool(targets and targets[-1][1] > 0.0 and run.by_step(stage, "training.sparsity.mean"))


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
    points = run.by_step(stage, f"training.{metric}")
    if points:
        label = name if offset == 0 else None
        axes.plot([offset + x for x, _ in points], [scale * y for _, y in points], style, color=colour, label=label)


def _perplexity_sheet(run: Selection) -> Sheet:
    return Sheet(("model", "token_perplexity"), tuple(_perplexities(run)))


def _layer_sheet(run: Selection) -> Sheet:
    subject, rates = _layers(run)
    rows = ((subject, half, layer, rate) for half, points in rates.items() for layer, rate in points)
    return Sheet(("model", "half", "layer", "skipped_share"), tuple(rows))


def _training_sheet(run: Selection) -> Sheet:
    rows: list[tuple[Value, ...]] = []
    for stage, _ in _stages(run):
        courses = [dict(run.by_step(stage, f"training.{metric}")) for metric in _COURSE]
        for step in sorted({step for course in courses for step in course}):
            values = [course.get(step) for course in courses]
            rows += [(stage, step, *values)]
    return Sheet(("stage", "step", *_COURSE), tuple(rows))


PERPLEXITY = Figure(
    name="perplexity", title="Perplexity", size=(9.0, 2.4), draw=_draw_perplexity, sheet=_perplexity_sheet
)
LAYERS = Figure(name="layers", title="Sparsity per layer", size=(9.0, 3.2), draw=_draw_layers, sheet=_layer_sheet)
TRAINING = Figure(name="training", title="Training", size=(9.0, 3.2), draw=_draw_training, sheet=_training_sheet)
FIGURES: tuple[Figure[Selection], ...] = (PERPLEXITY, LAYERS, *ROUTING_FIGURES, TRAINING)
"""All figures of a run."""


def figures_of(run: Selection) -> tuple[Figure[Selection], ...]:
    """Return the figures of a run, without those of what a static plan has not: routing, and a course of training.

    Args:
        run: Its records.
    """
    if not run.is_static():
        return FIGURES
    has_course = any(run.by_step(stage, "training.lm_loss") for stage in _STAGES)
    return (PERPLEXITY, LAYERS, *([TRAINING] if has_course else []))
