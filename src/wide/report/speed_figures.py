"""Figures of what the benches measured: operators, where the time goes, and whole forwards."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from wide.report.figure import Figure, Sheet
from wide.report.kernel_marks import draw_points, kernel_legend, kernel_name
from wide.report.profiles import OUTSIDE, Forward, OperatorPoint, Profile
from wide.report.selection import MissingRecordsError
from wide.report.style import BLUE, CYCLE, DASHES, MARKERS, ORANGE, SKY, VERMILION, YELLOW, legend_above

LINES = tuple(
    (f"{marker}{dash}", colour)
    for marker, dash, colour in zip(MARKERS, DASHES * 2, CYCLE[: 2 * len(DASHES)], strict=False)
)
"""Marker with dash, and colour, of the lines of a panel, in their order."""
OPERATOR_NAMES = {
    "gate_up": "gate and up",
    "q": "query",
    "down": "down",
    "o": "output",
    "prefill attention": "attention, prefill",
    "decode attention": "attention, decode",
    "gemv gate_up": "gate and up, decode",
    "gemv query": "query, decode",
    "gemv down": "down, decode",
    "gemv output": "output, decode",
}
"""Operators in words, in their order."""
MANY_SIZES = 3
"""From so many sizes of FFN groups on, forwards have a figure over them."""
_COLUMNS = 4
PARTS = {
    "attention": (BLUE, ""),
    "query, key and value": (SKY, ""),
    "output": (SKY, "//"),
    "gate_up": (ORANGE, "\\\\"),
    "down": (YELLOW, ""),
    "elementwise": ("#404040", ""),
    OUTSIDE: ("#B0B0B0", "xx"),
    "router": (VERMILION, ".."),
    "reorder": (VERMILION, "//"),
    "gaps": ("#FFFFFF", ""),
}
"""Part of a forward -> colour and hatch; parts of one hatch differ in lightness, so that grey tells them apart, too."""
_PART_NAMES = {"gate_up": "gate and up", "gaps": "gaps between kernels"}
_QUERY = ("query", "query or key and value")
_BAR, _PANEL, _LEGEND = 0.3, 0.75, 0.7
# Points of skipped share: names of points that are nearer to each other would overlap.
_NEAR = 12.0
# Of a panel's height.
_NAME_HEIGHT = 0.07

Series = dict[tuple[Any, ...], list[OperatorPoint]]


def _points(profile: Profile) -> dict[str, list[OperatorPoint]]:
    found = profile.operators()
    if not found:
        raise MissingRecordsError("no records of operators (operators.json, attention.json); run wide bench on a GPU")
    names = [*OPERATOR_NAMES, *(point.operator for point in found)]
    return {
        name: sorted((point for point in found if point.operator == name), key=lambda point: point.tokens)
        for name in dict.fromkeys(names)
        if any(point.operator == name for point in found)
    }


def _series(points: list[OperatorPoint]) -> Iterator[tuple[str, list[OperatorPoint]]]:
    """Yield the points of an operator by everything but their size, with a label."""
    series: Series = {}
    for point in points:
        series.setdefault((point.device, point.group_size, point.batch, point.active), []).append(point)
    devices = {point.device for point in points}
    # Single points belong to sweeps over something else, which have figures of their own.
    several = {key: members for key, members in series.items() if len({point.tokens for point in members}) > 1}
    for (device, group_size, batch, active), members in (several or _typical(series)).items():
        words = [f"{100 * (1 - active):.0f} % skipped"]
        words += [] if group_size is None else [f"G {group_size}"]
        words += [] if batch is None else [f"B {batch}"]
        words += [device] if len(devices) > 1 else []
        yield ", ".join(words), members


def _typical(series: Series) -> Series:
    """Return, of sweeps at one size, those at the share nearest to a half and the group size that has most shares."""
    nearest = min((active for *_, active in series), key=lambda active: abs(active - 0.5))
    sizes = [group_size for _, group_size, _, _ in series]
    most = max(sizes, key=sizes.count)
    return {key: members for key, members in series.items() if key[3] == nearest and key[1] == most}


def _draw_operators(figure: Any, profile: Profile) -> str:
    found = _points(profile)
    rows = -(-len(found) // _COLUMNS)
    panels = figure.subplots(rows, _COLUMNS, squeeze=False).flatten()
    sentences = []
    lines = {operator: list(_series(points)) for operator, points in found.items()}
    most = max(map(len, lines.values()))
    for axes, (operator, series) in zip(panels, lines.items(), strict=False):
        shown = [point for _, members in series for point in members]
        sizes, entries = sorted({point.tokens for point in shown}), {}
        for (label, members), (style, colour) in zip(series, LINES * len(series), strict=False):
            places = [sizes.index(point.tokens) for point in members]
            entries[label] = draw_points(axes, places, members, style, colour)
            ideal = [point.ideal for point in members]
            axes.plot(places, ideal, color=colour, linestyle=":", linewidth=1, marker="_", markersize=14)
            last = members[-1]
            words = f"{last.speedup:.2f}x at {last.tokens} ({label}; {kernel_name(last)})"
            sentences.append(f"{OPERATOR_NAMES.get(operator, operator)} {words}")
        axes.axhline(1, color="black", linewidth=1)
        axes.set_title(OPERATOR_NAMES.get(operator, operator), fontsize="medium", loc="left", pad=8 + 13 * most)
        axes.set_xticks(range(len(sizes)), [_short(size) for size in sizes])
        axes.set_xlim(-0.5, len(sizes) - 0.5)
        axes.set_ylim(0, 1.1 * max([2.0, *(point.ideal for point in shown), *(point.speedup for point in shown)]))
        legend_above(axes, columns=1, entries=entries)
    for axes in panels[len(found) :]:
        axes.set_axis_off()
    kernel_legend(figure, (point for points in found.values() for point in points))
    figure.supylabel("speed-up over the dense peer", fontsize="medium")
    figure.supxlabel("tokens (length of the text for attention); 1k is 1024", fontsize="medium")
    return (
        f"Speed-up of operators on {', '.join(profile.devices())} over their dense peers (black line) beside what "
        "would be ideal (dotted bars): " + "; ".join(sentences) + "."
    )


def _short(size: int) -> str:
    """Return a number of tokens in few letters: 4k is 4096."""
    return f"{size // 1024}k" if size % 1024 == 0 else f"{size}"


def _operator_sheet(profile: Profile) -> Sheet:
    header = ("operator", "device", "group_size", "batch", "tokens", "active", "backend", "candidate")
    rows = (
        (*(getattr(point, name) for name in header), point.median_us, point.dense_us, point.speedup, point.ideal)
        for points in _points(profile).values()
        for point in points
    )
    return Sheet((*header, "median_us", "dense_us", "speedup", "ideal_speedup"), tuple(rows))


def _forwards(profile: Profile) -> list[Forward]:
    found = profile.forwards()
    if not found:
        raise MissingRecordsError("no records of whole forwards (endtoend.json); run wide profile on a GPU")
    return found


def _broken_down(profile: Profile) -> list[Forward]:
    """Return the forwards whose parts were measured: dense ones, and those that run as users would run them."""
    found = [forward for forward in _forwards(profile) if forward.parts and not forward.is_variant]
    if not found:
        raise MissingRecordsError("no record with 'breakdown_us' in endtoend.json; run wide profile on a GPU")
    return found


def _bars(profile: Profile) -> dict[tuple[str, str], list[Forward]]:
    """Return the forwards that are drawn part by part, by model with group size, and shape; larger batches are not."""
    found = _broken_down(profile)
    least = min(forward.batch for forward in found)
    panels: dict[tuple[str, str], list[Forward]] = {}
    several = len({forward.group_size for forward in found}) > 1
    for forward in found:
        if forward.batch == least:
            model = f"{forward.model}, G {forward.group_size}" if several else forward.model
            panels.setdefault((model, forward.shape), []).append(forward)
    return {key: sorted(bars, key=lambda bar: bar.mean_skipped or 0.0) for key, bars in panels.items()}


def _breakdown_height(profile: Profile) -> float:
    return _LEGEND + sum(_PANEL + _BAR * len(bars) for bars in _bars(profile).values())


def _parts(forward: Forward) -> dict[str, float]:
    merged = {name: value for name, value in forward.parts.items() if name not in _QUERY}
    together = sum(value for name, value in forward.parts.items() if name in _QUERY)
    return merged | {"query, key and value": together} if together else merged


def _draw_breakdown(figure: Any, profile: Profile) -> str:
    found = _bars(profile)
    heights = [_PANEL + _BAR * len(bars) for bars in found.values()]
    panels = figure.subplots(len(found), 1, squeeze=False, gridspec_kw={"height_ratios": heights})[:, 0]
    sentences = []
    for axes, ((model, shape), bars) in zip(panels, found.items(), strict=True):
        scale, unit = (1000.0, "ms") if bars[0].median_us >= 1000 else (1.0, "us")
        for place, forward in enumerate(bars):
            begin = 0.0
            for name, (colour, hatch) in PARTS.items():
                width = max(0.0, _parts(forward).get(name, 0.0)) / scale
                label = _PART_NAMES.get(name, name) if place == 0 and axes is panels[0] else None
                options = {"color": colour, "hatch": hatch, "edgecolor": "black", "linewidth": 0.5}
                axes.barh(place, width, left=begin, label=label, **options)
                begin += width
            words = ", ".join(_bar_words(forward, scale, unit))
            axes.annotate(words, (begin, place), xytext=(4, 0), textcoords="offset points", va="center", fontsize=8)
            if words:
                sentences.append(f"{forward.shape}, {forward.candidate}: {words}")
        axes.set_yticks(range(len(bars)), _bar_names(bars))
        axes.invert_yaxis()
        axes.set_xlim(0, max(forward.median_us for forward in bars) / scale * 1.5)
        axes.set_title(f"{model}, {shape}, {unit}", fontsize="medium", loc="left")
        axes.grid(visible=False, axis="y")
    _legend_of_parts(figure)
    return (
        "Time by part of the forward, the measured beside the possible speed-up, and the mean time of a layer, without "
        "embedding and head. One kernel may compute queries, keys and values, which are one part: "
        + "; ".join(sentences)
        + "."
    )


def _bar_words(forward: Forward, scale: float, unit: str) -> Iterator[str]:
    if forward.ceiling is not None:
        yield f"{forward.speedup:.2f}x of {forward.ceiling:.2f}x possible"
    if forward.layer_us is not None:
        yield f"{forward.layer_us / scale:.3g} {unit} a layer"


def _bar_names(bars: list[Forward]) -> list[str]:
    """Return the candidates, with the run that their adapter is of where there are several."""
    if len({forward.adapter for forward in bars}) < 2:
        return [forward.candidate for forward in bars]
    runs = [Path(forward.adapter).parent.name for forward in bars]
    return [
        f"{forward.candidate}, {run}" if run else forward.candidate for forward, run in zip(bars, runs, strict=True)
    ]


def _legend_of_parts(figure: Any) -> None:
    from matplotlib.patches import Patch

    patches = [
        Patch(facecolor=colour, hatch=hatch, edgecolor="black", linewidth=0.5, label=_PART_NAMES.get(name, name))
        for name, (colour, hatch) in PARTS.items()
    ]
    figure.legend(handles=patches, loc="outside upper center", ncols=5, frameon=False, fontsize="small")


def _breakdown_sheet(profile: Profile) -> Sheet:
    header = ("model", "group_size", "what", "tokens", "batch", "candidate", "speedup", "ceiling", "part", "us")
    rows = (
        (*(getattr(forward, name) for name in header[:8]), name, value, _in_layer(forward, name))
        for forward in _broken_down(profile)
        for name, value in forward.parts.items()
    )
    return Sheet((*header, "us_a_layer"), tuple(rows))


def _in_layer(forward: Forward, part: str) -> float | None:
    return None if part == OUTSIDE or not forward.layers else forward.parts[part] / forward.layers


def _measured_rates(profile: Profile) -> dict[tuple[str, str], list[Forward]]:
    """Return the routed forwards by panel (what) and line (shape, model, group size), by what they skip."""
    lines: dict[tuple[str, str], list[Forward]] = {}
    forwards = _forwards(profile)
    # Larger batches have a figure of their own.
    least = min(forward.batch for forward in forwards)
    forwards = [forward for forward in forwards if forward.batch == least]
    several = len({forward.model for forward in forwards}) > 1
    for forward in forwards:
        if forward.skipped is not None and not forward.candidate.endswith("all sparse"):
            name = f"{forward.shape.partition(', ')[2]}, G {forward.group_size}"
            name = f"{forward.model}, {name}" if several else name
            lines.setdefault((forward.what, name), []).append(forward)
    if not lines:
        raise MissingRecordsError("no routed candidate in endtoend.json; run wide profile on a GPU")
    if len({forward.group_size for found in lines.values() for forward in found}) >= MANY_SIZES:
        # Those at one share belong to the sweep over group sizes.
        over = {
            key: found for key, found in lines.items() if len({f.skipped for f in found if any(f.skipped or ())}) > 1
        }
        lines = over or lines
    return {key: sorted(found, key=lambda each: each.mean_skipped or 0.0) for key, found in lines.items()}


def _draw_end_to_end(figure: Any, profile: Profile) -> str:
    lines = _measured_rates(profile)
    kinds = list(dict.fromkeys(what for what, _ in lines))
    panels = figure.subplots(1, len(kinds), squeeze=False, sharey=True)[0]
    sentences = []
    for axes, kind in zip(panels, kinds, strict=True):
        chosen = [(name, found) for (what, name), found in lines.items() if what == kind]
        for (name, found), (style, colour) in zip(chosen, LINES * len(chosen), strict=False):
            _draw_line(axes, [each for each in found if each.is_even], style, colour, name)
            _draw_apart(axes, [each for each in found if not each.is_even], style[0], colour)
        _name_apart(axes, [each for _, found in chosen for each in found if not each.is_even])
        for name, found in chosen:
            best = max(found, key=lambda each: each.speedup)
            sentences.append(f"{kind}, {name}: {best.speedup:.2f}x at {100 * (best.mean_skipped or 0):.0f} %")
        axes.axhline(1, color="black", linewidth=1)
        axes.set_xlabel("skipped groups, mean of attention and FFN, %")
        axes.set_title(kind, fontsize="medium", pad=12 + 14 * -(-len(chosen) // 2))
        legend_above(axes, columns=2)
    panels[0].set_ylabel("speed-up over dense")
    return (
        "Measured speed-up of whole forwards over the same runtime dense (black line), and the ceiling if routing cost "
        "nothing (dotted). Hollow points skip different shares of attention and FFN, which they name: "
        + "; ".join(sentences)
        + "."
    )


def _draw_line(axes: Any, found: list[Forward], style: str, colour: str, name: str) -> None:
    shares = [100 * (forward.mean_skipped or 0.0) for forward in found]
    axes.plot(shares, [forward.speedup for forward in found], style, color=colour, label=name)
    ceilings = [forward.ceiling for forward in found]
    axes.plot(shares, ceilings, color=colour, linestyle=":", linewidth=1, marker="_", markersize=12)


def _draw_apart(axes: Any, found: list[Forward], marker: str, colour: str) -> None:
    # What attention and FFN cost differs, so that the mean of unequal shares is no place on the line.
    for forward in found:
        place = (100 * (forward.mean_skipped or 0.0), forward.speedup)
        axes.plot(*place, marker, color=colour, fillstyle="none")
        if forward.ceiling is not None:
            axes.plot(place[0], forward.ceiling, color=colour, marker="_", markersize=12)


def _name_apart(axes: Any, found: list[Forward]) -> None:
    """Name what points beside the lines skip, each pair of shares once, below the lowest of its points."""
    lowest: dict[tuple[float, ...], tuple[float, float]] = {}
    for forward in found:
        place = (100 * (forward.mean_skipped or 0.0), forward.speedup)
        shares = forward.skipped or ()
        lowest[shares] = min(lowest.get(shares, place), place, key=lambda each: each[1])
    for names in _neighbours(lowest):
        words = "\n".join(" / ".join(f"{100 * share:.3g}" for share in name) for name in names)
        place = min((lowest[name] for name in names), key=lambda each: each[1])
        axes.annotate(words, place, xytext=(0, -7), textcoords="offset points", ha="center", va="top", fontsize=7)
    low, high = axes.get_ylim()
    # Room for the names below the lowest points, above the numbers of the axis.
    axes.set_ylim(low - _NAME_HEIGHT * max(map(len, _neighbours(lowest)), default=0) * (high - low), high)


def _neighbours(places: dict[tuple[float, ...], tuple[float, float]]) -> list[list[tuple[float, ...]]]:
    """Return the names by left to right, together where they would cover each other."""
    groups: list[list[tuple[float, ...]]] = []
    for name in sorted(places, key=lambda each: places[each]):
        near = groups and places[name][0] - places[groups[-1][-1]][0] < _NEAR
        groups = [*groups[:-1], [*groups[-1], name]] if near else [*groups, [name]]
    return groups


def _end_to_end_sheet(profile: Profile) -> Sheet:
    header = ("device", "model", "group_size", "what", "tokens", "batch", "candidate", "median_us")
    rows = (
        (*(getattr(each, name) for name in header), *(each.skipped or (None, None)), *_results(each))
        for each in _forwards(profile)
    )
    more = ("skipped_attention", "skipped_ffn", "speedup", "ceiling", "energy_per_token_j", "memory_bytes")
    return Sheet((*header, *more), tuple(rows))


def _results(each: Forward) -> tuple[float | None, ...]:
    return each.speedup, each.ceiling, each.energy_per_token_j, each.memory_bytes


SPEED_FIGURES: tuple[Figure[Profile], ...] = (
    Figure(
        name="end-to-end",
        title="Speed-up of whole forwards",
        size=(9.0, 3.6),
        draw=_draw_end_to_end,
        sheet=_end_to_end_sheet,
        files=lambda profile: [forward.file for forward in _forwards(profile)],
    ),
    Figure(
        name="breakdown",
        title="Where the time goes",
        size=(9.0, 6.4),
        draw=_draw_breakdown,
        sheet=_breakdown_sheet,
        files=lambda profile: [forward.file for forward in _broken_down(profile)],
        height=_breakdown_height,
    ),
    Figure(
        name="operators",
        title="Speed-up of operators",
        size=(9.0, 7.0),
        draw=_draw_operators,
        sheet=_operator_sheet,
        files=lambda profile: [point.file for points in _points(profile).values() for point in points],
    ),
)
"""Figures of a profile."""
