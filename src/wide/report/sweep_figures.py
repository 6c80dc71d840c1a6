"""Figures of sweeps: operators over groups and sparsities, decode over heads of a group, steps over batches."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from wide.report.figure import Figure, Sheet
from wide.report.kernel_marks import draw_points, kernel_legend, kernel_name
from wide.report.profiles import Forward, OperatorPoint, Profile
from wide.report.selection import MissingRecordsError
from wide.report.speed_figures import LINES, MANY_SIZES, OPERATOR_NAMES
from wide.report.style import BLUE, GREEN, GREY, ORANGE, legend_above

_COLUMNS = 4
_GROUP_LINES = {
    "operator": ("o-", BLUE, "this group size"),
    "operator, whole KV heads": ("^-.", GREEN, "whole KV heads if any head executes"),
    "dense operator": ("s--", ORANGE, "nothing skipped"),
}

Key = Callable[[OperatorPoint], float | None]


def _sparsity(point: OperatorPoint) -> float:
    return round(100 * (1 - point.active), 6)


def _group(point: OperatorPoint) -> int | None:
    return point.group_size


def _series(profile: Profile, key: Key) -> dict[str, dict[str, list[OperatorPoint]]]:
    """Return the points by operator and by all else than what varies, where at least two values of it were timed."""
    found: dict[str, dict[str, list[OperatorPoint]]] = {}
    for point in profile.operators():
        words = [f"{point.tokens:,} token{'' if point.tokens == 1 else 's'}"] + (
            [] if point.batch is None else [f"B {point.batch}"]
        )
        words += [f"G {point.group_size}"] if point.group_size is not None and key is not _group else []
        words += [f"{_sparsity(point):g} % skipped"] if key is not _sparsity else []
        if key(point) is not None:
            found.setdefault(point.operator, {}).setdefault(", ".join([*words, point.device]), []).append(point)
    several = {
        operator: {name: _ordered(points, key) for name, points in lines.items() if len({*map(key, points)}) > 1}
        for operator, lines in found.items()
    }
    return {operator: several[operator] for operator in [*OPERATOR_NAMES, *several] if several.get(operator)}


def _ordered(points: Sequence[OperatorPoint], key: Key) -> list[OperatorPoint]:
    return sorted(points, key=lambda point: key(point) or 0)


def _known(profile: Profile, key: Key, what: str) -> dict[str, dict[str, list[OperatorPoint]]]:
    found = _series(profile, key)
    if not found:
        raise MissingRecordsError(
            f"no operator was timed at several {what}; run wide bench --operators coarse on a GPU"
        )
    return found


def _draw_sweep(figure: Any, profile: Profile, key: Key, what: str, label: str) -> str:
    found = _known(profile, key, what)
    columns = min(_COLUMNS, len(found))
    panels = figure.subplots(-(-len(found) // columns), columns, squeeze=False).flatten()
    sentences = []
    most = max(map(len, found.values()))
    for axes, (operator, lines) in zip(panels, found.items(), strict=False):
        name = OPERATOR_NAMES.get(operator, operator)
        entries: dict[str, Any] = {}
        places = sorted({key(point) or 0 for points in lines.values() for point in points})
        for (words, points), (style, colour) in zip(lines.items(), LINES * len(lines), strict=False):
            at = [places.index(key(point) or 0) for point in points]
            shown = words.rpartition(", ")[0]
            entries[shown] = draw_points(axes, at, points, style, colour)
            ideal = [point.ideal for point in points]
            axes.plot(at, ideal, color=colour, linestyle=":", linewidth=1, marker="_", markersize=14)
            values = ", ".join(f"{point.speedup:.2f}x at {key(point):g} ({kernel_name(point)})" for point in points)
            sentences.append(f"{name} ({shown}): {values}")
        axes.axhline(1, color="black", linewidth=1)
        axes.set_title(name, fontsize="medium", loc="left", pad=8 + 13 * most)
        axes.set_xticks(range(len(places)), [f"{place:g}" for place in places])
        axes.set_xlim(-0.5, len(places) - 0.5)
        axes.set_ylim(0, None)
        legend_above(axes, columns=1, entries=entries)
    for axes in panels[len(found) :]:
        axes.set_axis_off()
    kernel_legend(figure, (point for lines in found.values() for points in lines.values() for point in points))
    figure.supylabel("speed-up over the dense peer", fontsize="medium")
    figure.supxlabel(label, fontsize="medium")
    return (
        f"Speed-up of operators over {what}, beside the dense peer (black line) and the ideal (dotted bars): "
        + "; ".join(sentences)
        + "."
    )


def _sweep_sheet(profile: Profile, key: Key, what: str) -> Sheet:
    names = "operator device group_size batch tokens active backend candidate median_us dense_us"
    header = tuple(names.split())
    rows = (
        (*(getattr(point, name) for name in header), point.speedup, point.ideal)
        for lines in _known(profile, key, what).values()
        for points in lines.values()
        for point in points
    )
    return Sheet((*header, "speedup", "ideal_speedup"), tuple(rows))


def _sweep_files(profile: Profile, key: Key, what: str) -> list[str]:
    found = _known(profile, key, what)
    return [point.file for lines in found.values() for points in lines.values() for point in points]


def _decode_groups(profile: Profile) -> dict[str, list[Mapping[str, Any]]]:
    found: dict[str, list[Mapping[str, Any]]] = {}
    for record in profile.decode_groups():
        words = f"{record['batch']} sequences, {record['length']:,} keys, {100 * (1 - record['active']):g} % skipped"
        found.setdefault(words, []).append(record)
    if not found:
        raise MissingRecordsError(
            "no records of decode attention over group sizes; run wide bench --operators decode_groups on a GPU"
        )
    return found


def _draw_decode_groups(figure: Any, profile: Profile) -> str:
    found = _decode_groups(profile)
    sentences = []
    for axes, (words, records) in zip(figure.subplots(1, len(found), squeeze=False)[0], found.items(), strict=True):
        sizes = sorted({record["group_size"] for record in records})
        for name, (style, colour, label) in _GROUP_LINES.items():
            points = sorted((r for r in records if r["candidate"] == name), key=lambda record: record["group_size"])
            at = [sizes.index(record["group_size"]) for record in points]
            axes.plot(at, [record["speedup"] for record in points], style, color=colour, label=label)
            if name == "operator":
                ideal = [1 / record["union"] for record in points]
                axes.plot(
                    at, ideal, color=GREY, linestyle=":", marker="_", markersize=14, label="ideal: needed KV heads"
                )
                values = ", ".join(f"{record['speedup']:.2f}x at {record['group_size']}" for record in points)
                sentences.append(f"{words}: {values}")
        axes.axhline(1, color="black", linewidth=1)
        axes.set_xticks(range(len(sizes)), [f"{size}" for size in sizes])
        axes.set_xlabel("channels of an attention group")
        axes.set_ylabel("speed-up over the dense peer")
        axes.set_ylim(0, None)
        axes.set_title(words, fontsize="medium", loc="left", pad=38)
        legend_above(axes, columns=2)
    return (
        "Decode attention over the size of groups. A group smaller than a KV head's share of the queries reads that "
        "head's cache once for each of its executing groups. " + "; ".join(sentences) + "."
    )


def _decode_groups_sheet(profile: Profile) -> Sheet:
    names = "device batch length active group_size group_heads union candidate peer median_us speedup"
    header = tuple(names.split())
    records = [record for records in _decode_groups(profile).values() for record in records]
    return Sheet(header, tuple(tuple(record.get(name) for name in header) for record in records))


def _batches(profile: Profile) -> list[Forward]:
    forwards = [forward for forward in profile.forwards() if not forward.is_variant]
    steps = [forward for forward in forwards if forward.what == "decode"]
    sizes = dict.fromkeys((forward.model, forward.adapter, forward.group_size, forward.tokens) for forward in steps)
    kept = []
    for size in sizes:
        same = [f for f in steps if (f.model, f.adapter, f.group_size, f.tokens) == size]
        for candidate in dict.fromkeys(forward.candidate for forward in same):
            line = [forward for forward in same if forward.candidate == candidate]
            kept += line if len({forward.batch for forward in line}) > 1 else []
    if not kept:
        raise MissingRecordsError("no decode steps of several batches in endtoend.json; run wide profile --batch 1,2,4")
    return sorted(kept, key=lambda f: (f.model, f.adapter, f.group_size or 0, f.tokens, f.candidate, f.batch))


def _draw_batches(figure: Any, profile: Profile) -> str:
    forwards = _batches(profile)
    lines: dict[str, list[Forward]] = {}
    for forward in forwards:
        shape = f", {forward.tokens:,} cached" if len({f.tokens for f in forwards}) > 1 else ""
        lines.setdefault(f"{forward.candidate}{shape}", []).append(forward)
    batches = sorted({forward.batch for forward in forwards})
    values: tuple[tuple[str, Callable[[Forward], float | None]], ...] = (
        ("speed-up over dense", lambda forward: forward.speedup),
        ("energy, J a token", lambda forward: forward.energy_per_token_j),
        ("peak memory, GiB", lambda forward: None if not forward.memory_bytes else forward.memory_bytes / 2**30),
    )
    panels = figure.subplots(1, len(values))
    for axes, (label, value) in zip(panels, values, strict=True):
        for (name, found), (style, colour) in zip(lines.items(), LINES * len(lines), strict=False):
            points = [(batches.index(f.batch), number) for f in found if (number := value(f)) is not None]
            if points:
                axes.plot(*zip(*points, strict=True), style, color=colour, label=name)
            if value is values[0][1] and found[0].ceiling is not None:
                places = [batches.index(forward.batch) for forward in found]
                axes.plot(places, [f.ceiling for f in found], color=colour, linestyle=":", marker="_", markersize=12)
        if not axes.lines:
            axes.text(0.5, 0.5, "not measured", ha="center", va="center", transform=axes.transAxes)
        axes.set_title(label, fontsize="medium", loc="left")
        axes.set_xticks(range(len(batches)), [str(batch) for batch in batches])
        axes.set_xlabel("sequences")
        axes.set_ylim(0, None)
    figure.legend(
        *panels[0].get_legend_handles_labels(), loc="outside upper center", ncols=4, frameon=False, fontsize="small"
    )
    routed = [f"{f.candidate}, {f.batch} sequences: {f.speedup:.2f}x" for f in forwards if f.candidate != "dense"]
    return "Decode steps of several sequences; dotted: the ceiling. " + "; ".join(routed) + "."


def _batch_sheet(profile: Profile) -> Sheet:
    names = "device model adapter group_size tokens batch candidate median_us speedup ceiling"
    header = (*names.split(), "energy_per_token_j", "memory_bytes")
    return Sheet(header, tuple(tuple(getattr(each, name) for name in header) for each in _batches(profile)))


def _group_sweeps(profile: Profile) -> dict[tuple[str, str], list[Forward]]:
    """Return routed forwards that differ in the size of FFN groups alone, by what and line, smallest group first."""
    lines: dict[tuple[str, str], list[Forward]] = {}
    for each in profile.forwards():
        # Trained routers are another model at each size.
        if (
            each.skipped is not None
            and not each.adapter
            and each.candidate.startswith("routed")
            and not each.is_variant
        ):
            name = f"{each.model}, {each.shape.partition(', ')[2]}, {each.candidate.removeprefix('routed ')}"
            lines.setdefault((each.what, name), []).append(each)
    several = {key: found for key, found in lines.items() if len({each.group_size for each in found}) >= MANY_SIZES}
    if not several:
        raise MissingRecordsError(
            f"no forwards over {MANY_SIZES} sizes of FFN groups; run wide profile once for each --ffn_group_size"
        )
    return {key: sorted(found, key=lambda each: each.group_size or 0) for key, found in several.items()}


def _draw_group_sweeps(figure: Any, profile: Profile) -> str:
    lines, sentences = _group_sweeps(profile), []
    kinds = list(dict.fromkeys(what for what, _ in lines))
    for axes, kind in zip(figure.subplots(1, len(kinds), squeeze=False, sharey=True)[0], kinds, strict=True):
        chosen = [(name, found) for (what, name), found in lines.items() if what == kind]
        sizes = sorted({each.group_size or 0 for _, found in chosen for each in found})
        for (name, found), (style, colour) in zip(chosen, LINES * len(chosen), strict=False):
            places = [sizes.index(each.group_size or 0) for each in found]
            axes.plot(places, [each.speedup for each in found], style, color=colour, label=name)
            ceilings = [each.ceiling for each in found]
            axes.plot(places, ceilings, color=colour, linestyle=":", linewidth=1, marker="_", markersize=12)
            values = ", ".join(f"{each.speedup:.2f}x at {each.group_size}" for each in found)
            sentences.append(f"{kind}, {name}: {values}")
        axes.axhline(1, color="black", linewidth=1)
        axes.set_xticks(range(len(sizes)), [str(size) for size in sizes])
        axes.set_xlabel("channels of an FFN group")
        axes.set_title(kind, fontsize="medium", pad=12 + 14 * len(chosen))
        axes.set_ylim(0, None)
        legend_above(axes, columns=1)
    figure.supylabel("speed-up over dense", fontsize="medium")
    return (
        "Measured speed-up of whole forwards over the size of FFN groups, beside the ceiling if routing cost nothing "
        "(dotted): " + "; ".join(sentences) + "."
    )


def _group_sweep_sheet(profile: Profile) -> Sheet:
    names = "device model group_size what tokens batch candidate median_us speedup ceiling"
    header = tuple(names.split())
    forwards = [each for found in _group_sweeps(profile).values() for each in found]
    return Sheet(header, tuple(tuple(getattr(each, name) for name in header) for each in forwards))


SWEEP_FIGURES: tuple[Figure[Profile], ...] = (
    Figure(
        name="operators-groups",
        title="Operators over the size of groups",
        size=(9.0, 3.6),
        draw=lambda figure, profile: _draw_sweep(figure, profile, _group, "group sizes", "channels of a group"),
        sheet=lambda profile: _sweep_sheet(profile, _group, "group sizes"),
        files=lambda profile: _sweep_files(profile, _group, "group sizes"),
    ),
    Figure(
        name="operators-sparsity",
        title="Operators over sparsity",
        size=(9.0, 6.4),
        draw=lambda figure, profile: _draw_sweep(figure, profile, _sparsity, "sparsities", "skipped pairs, %"),
        sheet=lambda profile: _sweep_sheet(profile, _sparsity, "sparsities"),
        files=lambda profile: _sweep_files(profile, _sparsity, "sparsities"),
    ),
    Figure(
        name="decode-groups",
        title="Decode attention over the size of groups",
        size=(9.0, 3.8),
        draw=_draw_decode_groups,
        sheet=_decode_groups_sheet,
        files=lambda profile: [str(each["file"]) for found in _decode_groups(profile).values() for each in found],
    ),
    Figure(
        name="end-to-end-groups",
        title="Whole forwards over the size of groups",
        size=(9.0, 3.6),
        draw=_draw_group_sweeps,
        sheet=_group_sweep_sheet,
        files=lambda profile: [each.file for found in _group_sweeps(profile).values() for each in found],
    ),
    Figure(
        name="batches",
        title="Batched decode",
        size=(9.0, 3.4),
        draw=_draw_batches,
        sheet=_batch_sheet,
        files=lambda profile: [each.file for each in _batches(profile)],
    ),
)
"""Figures of sweeps; each needs what varies to have been timed at two values at least."""
