"""Figures of what routers do with a text: which groups, which tokens, and how they hang together."""

from typing import Any

from wide.report.figure import Figure, Sheet, Value
from wide.report.selection import MissingRecordsError, Selection
from wide.report.style import HALF_COLOURS, HALF_NAMES, legend_above, share_colours, signed_colours, whole_numbers
from wide.report.table import AFTER

_MOST_LABELS = 48
_WORDS_IN_CELLS_UP_TO = 8
_MEASURE = "measure the routing (wide prune with held-out text does)"
_MARKERS = {"attention": "o", "ffn": "s"}
_NEGATIVE, _MISSING = "////", "xx"
_HATCH: dict[str, Any] = {"facecolor": "none", "edgecolor": "#00000060", "linewidth": 0.0}
# Nearer to zero, cells are written and look as zero.
_HATCHED_FROM = 0.05
_STYLES = {"attention": "-", "ffn": "--"}


def _subject(run: Selection, name: str) -> str:
    subject = run.last_subject_with(*(f"routing.{half}.{name}" for half in HALF_NAMES))
    if subject is None:
        raise MissingRecordsError(f"no record 'routing.attention.{name}' or 'routing.ffn.{name}'; {_MEASURE}")
    return subject


def _patterns(run: Selection) -> tuple[str, dict[str, list[tuple[int, dict[str, Any]]]]]:
    subject = _subject(run, "by_group")
    found = {half: run.json_by_layer(subject, f"routing.{half}.by_group") for half in HALF_NAMES}
    return subject, {half: layers for half, layers in found.items() if layers}


def _draw_patterns(figure: Any, run: Selection) -> str:
    subject, found = _patterns(run)
    panels = figure.subplots(1, len(found), squeeze=False)[0]
    sentences = []
    for axes, (half, layers) in zip(panels, found.items(), strict=True):
        longest = max(len(entry["shares"]) for _, entry in layers)
        missing = float("nan")
        rows = [[*entry["shares"], *[missing] * (longest - len(entry["shares"]))] for _, entry in layers]
        image = axes.imshow(rows, aspect="auto", cmap=share_colours(), vmin=0, vmax=1, interpolation="nearest")
        groups = layers[0][1]["groups"]
        binned = "" if longest == groups else f", {groups} groups in {longest} bins"
        axes.set_title(HALF_NAMES[half] + binned, fontsize="medium")
        axes.set_xlabel("group" if longest == groups else "bin of neighbouring groups")
        axes.set_yticks(range(len(layers)), [str(layer) for layer, _ in layers])
        _thin(axes, len(layers))
        axes.grid(visible=False)
        whole_numbers(axes.xaxis)
        shares = [share for _, entry in layers for share in entry["shares"]]
        busy = sum(share > 0.95 for share in shares) / len(shares)
        idle = sum(share < 0.05 for share in shares) / len(shares)
        sentences.append(
            f"{HALF_NAMES[half]}: {100 * busy:.0f} % of the groups are executed by almost all tokens, "
            f"{100 * idle:.0f} % by almost none"
        )
    panels[0].set_ylabel("decoder layer")
    figure.colorbar(image, ax=panels[-1], label="share of tokens")
    return f"Share of tokens that execute each group {AFTER[subject]}. " + "; ".join(sentences) + "."


def _thin(axes: Any, count: int) -> None:
    """Show every n-th label where all of them would overlap."""
    every = -(-count // 16)
    for place, label in enumerate(axes.get_yticklabels()):
        label.set_visible(place % every == 0)


def _pattern_sheet(run: Selection) -> Sheet:
    _, found = _patterns(run)
    rows: list[tuple[Value, ...]] = []
    for half, layers in found.items():
        for layer, entry in layers:
            rows += [(half, layer, entry["groups"], bin_, share) for bin_, share in enumerate(entry["shares"])]
    return Sheet(("half", "layer", "groups", "group_or_bin", "share_of_tokens"), tuple(rows))


def _sample(run: Selection) -> dict[str, Any]:
    subject = run.last_subject_with("routing.sample")
    if subject is None:
        raise MissingRecordsError(f"no record 'routing.sample'; {_MEASURE}")
    found: dict[str, Any] = run.json(subject, "routing.sample")
    if not {"tokens", "attention"} <= set(found) and not {"tokens", "ffn"} <= set(found):
        raise MissingRecordsError("record 'routing.sample' has no tokens, or no shares of them; measure it again")
    return found


def _draw_tokens(figure: Any, run: Selection) -> str:
    sample = _sample(run)
    tokens = sample["tokens"][:_MOST_LABELS]
    halves = [half for half in HALF_NAMES if half in sample]
    panels = figure.subplots(len(halves), 1, squeeze=False, sharex=True)[:, 0]
    for axes, half in zip(panels, halves, strict=True):
        rows = list(zip(*sample[half][:_MOST_LABELS], strict=True))
        shares = [[float("nan") if share is None else share / 100 for share in row] for row in rows]
        image = axes.imshow(shares, aspect="auto", cmap=share_colours(), vmin=0, vmax=1, interpolation="nearest")
        axes.set_title(HALF_NAMES[half], fontsize="medium")
        axes.set_ylabel("layer")
        axes.set_yticks(range(len(rows)))
        _thin(axes, len(rows))
        axes.grid(visible=False)
    panels[-1].set_xticks(range(len(tokens)), [_word(token) for token in tokens], rotation=90, fontsize="small")
    figure.colorbar(image, ax=list(panels), label="share of groups")
    return f"Share of groups that each of the first {len(tokens)} tokens executes in each layer."


def _word(token: str) -> str:
    # A dollar sign would begin a formula.
    return token.strip().replace("$", r"\$")[:14] or {"\n": "↵"}.get(token[:1], "␣")


def _token_sheet(run: Selection) -> Sheet:
    sample = _sample(run)
    rows: list[tuple[Value, ...]] = []
    for half in HALF_NAMES:
        for place, layers in enumerate(sample.get(half, ())):
            token = sample["tokens"][place]
            rows += [
                (half, place, token, layer, None if share is None else share / 100)
                for layer, share in enumerate(layers)
            ]
    return Sheet(("half", "position", "token", "layer", "share_of_groups"), tuple(rows))


_SERIES = (("group_correlation", "groups apart"), ("token_correlation", "tokens apart"))


def _correlations(run: Selection) -> dict[str, dict[str, list[float | None]]]:
    subject = run.last_subject_with(*(f"routing.{half}.{name}" for half in HALF_NAMES for name, _ in _SERIES))
    if subject is None:
        raise MissingRecordsError(f"no record 'routing.ffn.group_correlation' or 'token_correlation'; {_MEASURE}")
    return {
        name: {
            half: series for half in HALF_NAMES if (series := run.json(subject, f"routing.{half}.{name}")) is not None
        }
        for name, _ in _SERIES
    }


def _draw_correlations(figure: Any, run: Selection) -> str:
    found = _correlations(run)
    panels = figure.subplots(1, 2, sharey=True)
    sentences = []
    for axes, (name, label) in zip(panels, _SERIES, strict=True):
        for half, series in found[name].items():
            points = [(distance, value) for distance, value in enumerate(series, 1) if value is not None]
            if points:
                style = _MARKERS[half] + _STYLES[half]
                axes.plot(*zip(*points, strict=True), style, color=HALF_COLOURS[half], label=HALF_NAMES[half])
                sentences.append(f"{HALF_NAMES[half]}, {points[0][0]} {label}: {points[0][1]:z.2f}")
        axes.axhline(0, color="black", linewidth=0.8)
        axes.set_xlabel(label)
        whole_numbers(axes.xaxis)
        if axes.get_legend_handles_labels()[0]:
            legend_above(axes)
    panels[0].set_ylabel("phi coefficient, mean over layers")
    return (
        "Mean correlation of the decisions of two groups for the same token (left) and of one group for two tokens "
        "(right), by their distance. " + "; ".join(sentences) + "."
    )


def _correlation_sheet(run: Selection) -> Sheet:
    rows = (
        (name, half, distance, value)
        for name, halves in _correlations(run).items()
        for half, series in halves.items()
        for distance, value in enumerate(series, 1)
    )
    return Sheet(("between", "half", "distance", "phi"), tuple(rows))


def _matrices(run: Selection) -> list[tuple[str, int, dict[str, Any]]]:
    subject = _subject(run, "group_matrix")
    found = []
    for half in HALF_NAMES:
        layers = run.json_by_layer(subject, f"routing.{half}.group_matrix")
        found += [(half, layer, entry) for layer, entry in layers]
    return found


def _draw_matrices(figure: Any, run: Selection) -> str:
    found = _matrices(run)
    panels = figure.subplots(1, len(found), squeeze=False)[0]
    for axes, (half, layer, entry) in zip(panels, found, strict=True):
        missing = float("nan")
        rows = [[missing if value is None else value for value in row] for row in entry["phi"]]
        image = axes.imshow(rows, cmap=signed_colours(), vmin=-1, vmax=1, interpolation="nearest")
        axes.set_title(f"{HALF_NAMES[half]}, layer {layer}", fontsize="medium")
        count = len(entry["groups"])
        shown = range(0, count, -(-count // 8))
        axes.set_xticks(shown, [str(entry["groups"][place]) for place in shown], fontsize="small")
        axes.set_yticks(shown, [str(entry["groups"][place]) for place in shown], fontsize="small")
        axes.grid(visible=False)
        _hatch(axes, rows)
        if count <= _WORDS_IN_CELLS_UP_TO:
            _write_cells(axes, rows)
    panels[0].set_ylabel("group")
    figure.supxlabel("group", fontsize="medium")
    bar = figure.colorbar(image, ax=list(panels), label="phi coefficient", shrink=0.8)
    bar.ax.axhspan(-1.0, -_HATCHED_FROM, hatch=_NEGATIVE, **_HATCH)
    layers = ", ".join(f"{HALF_NAMES[half]} layer {layer}" for half, layer, _ in found)
    return (
        "Correlation of the decisions of each two groups for the same token, in the layers that execute most and "
        f"least: {layers}. Negative ones are hatched; groups whose decisions never change are grey and crossed."
    )


def _hatch(axes: Any, rows: list[list[float]]) -> None:
    """Hatch what in grey would be taken for another value: negative cells, and those without a value."""
    from matplotlib.patches import Rectangle

    for y, row in enumerate(rows):
        for x, value in enumerate(row):
            hatch = "" if value > -_HATCHED_FROM else _NEGATIVE if value == value else _MISSING
            if hatch:
                axes.add_patch(Rectangle((x - 0.5, y - 0.5), 1, 1, hatch=hatch, **_HATCH))


def _write_cells(axes: Any, rows: list[list[float]]) -> None:
    for y, row in enumerate(rows):
        for x, value in enumerate(row):
            if value == value:
                colour = "white" if value > 0.5 else "black"
                words = f"{value:z.1f}"
                axes.text(x, y, words, ha="center", va="center", fontsize="x-small", color=colour)


def _matrix_sheet(run: Selection) -> Sheet:
    rows: list[tuple[Value, ...]] = []
    for half, layer, entry in _matrices(run):
        for first, row in zip(entry["groups"], entry["phi"], strict=True):
            rows += [(half, layer, first, second, value) for second, value in zip(entry["groups"], row, strict=True)]
    return Sheet(("half", "layer", "group", "other_group", "phi"), tuple(rows))


def _stability(run: Selection) -> list[tuple[str, str, list[tuple[int, float]]]]:
    subject = _subject(run, "same_as_previous")
    names = ("same_as_previous", "same_by_chance")
    found = [(half, name, run.by_layer(subject, f"routing.{half}.{name}")) for half in HALF_NAMES for name in names]
    return [entry for entry in found if entry[2]]


def _draw_stability(figure: Any, run: Selection) -> str:
    axes = figure.subplots()
    subject = _subject(run, "same_as_previous")
    sentences = []
    for half, name, points in _stability(run):
        measured = name == "same_as_previous"
        style = f"{_MARKERS[half]}{_STYLES[half]}" if measured else ":"
        label = HALF_NAMES[half] + ("" if measured else ", if tokens were independent")
        values = [100 * value for _, value in points]
        axes.plot([layer for layer, _ in points], values, style, color=HALF_COLOURS[half], label=label)
        if measured:
            sentences.append(f"{HALF_NAMES[half]} {sum(values) / len(values):.0f} %")
    shares = {half: run.number(subject, f"routing.{half}.flips_bfloat16") for half in HALF_NAMES}
    flips = ", ".join(f"{100 * s:.2g} % in {HALF_NAMES[half]}" for half, s in shares.items() if s is not None)
    noise = f"decisions that change when hidden states are rounded to bfloat16: {flips}" if flips else ""
    sentences += [noise] if noise else []
    axes.set_xlabel("decoder layer" + (f"\n({noise})" if noise else ""))
    axes.set_ylabel("decisions as for the\nprevious token, %")
    whole_numbers(axes.xaxis)
    legend_above(axes, columns=4)
    return "Share of decisions equal to the previous token's: " + ", ".join(sentences) + "."


def _stability_sheet(run: Selection) -> Sheet:
    rows = [(half, layer, name, value) for half, name, points in _stability(run) for layer, value in points]
    return Sheet(("half", "layer", "metric", "share"), tuple(rows))


ROUTING_FIGURES: tuple[Figure[Selection], ...] = (
    Figure(
        name="tokens",
        title="Execution by token and layer",
        size=(9.0, 4.6),
        draw=_draw_tokens,
        sheet=_token_sheet,
    ),
    Figure(
        name="group-patterns",
        title="Execution by group and layer",
        size=(9.0, 3.2),
        draw=_draw_patterns,
        sheet=_pattern_sheet,
    ),
    Figure(
        name="correlation",
        title="Correlation between groups and between tokens",
        size=(9.0, 3.2),
        draw=_draw_correlations,
        sheet=_correlation_sheet,
    ),
    Figure(
        name="group-correlation",
        title="Correlation of each two groups",
        size=(9.0, 2.9),
        draw=_draw_matrices,
        sheet=_matrix_sheet,
    ),
    Figure(
        name="stability",
        title="Stability from token to token",
        size=(9.0, 3.2),
        draw=_draw_stability,
        sheet=_stability_sheet,
    ),
)
"""Figures of the records that `wide.evaluation.routing_records` writes."""
