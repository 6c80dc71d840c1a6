"""Figures of what the benches measured: operators, whole forwards, where the time goes, and naive products."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from wide.report.figure import Figure, Row, required
from wide.report.profiles import OUTSIDE, Forward, OperatorPoint, Profile
from wide.report.table import Table

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
_MANY_SIZES = 3
"""From so many sizes of FFN groups on, forwards have a figure over them."""
_PARTS = ("attention", "query, key and value", "output", "gate_up", "down", "elementwise", OUTSIDE, "router", "reorder")
_QUERY = ("query", "query or key and value")
_STAGES = ("indices", "sort", "gather", "GEMM", "scatter", "rest")
Key = Callable[[OperatorPoint], float | None]


def _tokens(point: OperatorPoint) -> float:
    return point.tokens


def _group(point: OperatorPoint) -> float | None:
    return point.group_size


def _sparsity(point: OperatorPoint) -> float:
    return round(100 * (1 - point.active), 6)


def _operator_rows(profile: Profile, key: Key) -> list[Row]:
    """Return the points of lines along which only what `key` says varies."""
    lines: dict[tuple[Any, ...], list[OperatorPoint]] = {}
    for point in profile.operators():
        if key(point) is not None:
            facts = {_tokens: point.tokens, _group: point.group_size, _sparsity: point.active}
            rest = tuple(value for each, value in facts.items() if each is not key)
            lines.setdefault((point.operator, point.device, point.batch, *rest), []).append(point)
    several = {line: points for line, points in lines.items() if len({*map(key, points)}) > 1}
    if key is _tokens:
        # An operator that was timed at one size is shown there, at the share nearest to a half.
        for operator in {line[0] for line in lines} - {line[0] for line in several}:
            single = [point for line, points in lines.items() if line[0] == operator for point in points]
            sizes = [point.group_size for point in single]
            nearest = min(single, key=lambda point: (abs(point.active - 0.5), -sizes.count(point.group_size)))
            several |= {line: points for line, points in lines.items() if nearest in points}
    order = [*OPERATOR_NAMES, *(line[0] for line in several)]
    devices = {line[1] for line in several}
    found = [point for line in several.values() for point in line]
    found.sort(key=lambda p: (order.index(p.operator), p.device, p.batch or 0, -p.active, p.group_size or 0, p.tokens))
    return [
        {
            "operator": OPERATOR_NAMES.get(point.operator, point.operator),
            "line": ", ".join(_line_words(point, key, several_devices=len(devices) > 1)),
            "device": point.device,
            "group_size": point.group_size,
            "batch": point.batch,
            "tokens": point.tokens,
            "active": point.active,
            "skipped, %": _sparsity(point),
            "backend": point.backend,
            "candidate": point.candidate,
            "median_us": point.median_us,
            "dense_us": point.dense_us,
            "speedup": point.speedup,
            "ideal_speedup": point.ideal,
        }
        for point in found
    ]


def _line_words(point: OperatorPoint, key: Key, *, several_devices: bool) -> Iterator[str]:
    if key is not _tokens:
        yield f"{point.tokens:,} token{'' if point.tokens == 1 else 's'}"
    if key is not _sparsity:
        yield f"{_sparsity(point):.4g} % skipped"
    if key is not _group and point.group_size is not None:
        yield f"G {point.group_size}"
    if point.batch is not None:
        yield f"B {point.batch}"
    if several_devices:
        yield point.device


def _forward_row(each: Forward, **more: Any) -> Row:
    attention, ffn = each.skipped or (None, None)
    names = [
        "device",
        "model",
        "adapter",
        "group_size",
        "what",
        "tokens",
        "batch",
        "candidate",
        "median_us",
        "speedup",
        "ceiling",
    ]
    return {
        **{name: getattr(each, name) for name in names},
        "skipped_attention": attention,
        "skipped_ffn": ffn,
        "energy_per_token_j": each.energy_per_token_j,
        "memory_bytes": each.memory_bytes,
        **more,
    }


def _end_to_end(profile: Profile) -> list[Row]:
    forwards = profile.forwards()
    # Larger batches have a figure of their own.
    least = min((each.batch for each in forwards), default=0)
    several = len({each.model for each in forwards}) > 1
    lines: dict[tuple[str, str], list[Forward]] = {}
    for each in forwards:
        if each.skipped is not None and not each.candidate.endswith("all sparse") and each.batch == least:
            name = f"{each.model + ', ' if several else ''}{each.shape.partition(', ')[2]}, G {each.group_size}"
            lines.setdefault((each.what, name), []).append(each)
    if len({each.group_size for found in lines.values() for each in found}) >= _MANY_SIZES:
        # Those at one share belong to the sweep over group sizes.
        lines = {
            key: found for key, found in lines.items() if len({f.skipped for f in found if any(f.skipped or ())}) > 1
        } or lines
    rows = []
    for (_, name), found in lines.items():
        for each in sorted(found, key=lambda each: each.mean_skipped or 0.0):
            apart = "" if each.is_even else " / ".join(f"{100 * share:.3g}" for share in each.skipped or ())
            skipped = 100 * (each.mean_skipped or 0.0)
            more = {"line": name, "even": int(each.is_even), "words": apart, "skipped, %": skipped}
            rows.append(_forward_row(each, **more, drawn=each.speedup))
    shown = [each for found in lines.values() for each in found]
    # Dense forwards and larger batches are in the table only.
    blank = dict.fromkeys(("line", "even", "words", "skipped, %", "drawn"))
    return rows and rows + [_forward_row(each, **blank) for each in forwards if each not in shown]


def _over_groups(profile: Profile) -> list[Row]:
    """Return routed forwards that differ in the size of FFN groups alone; trained routers differ in more."""
    lines: dict[tuple[str, str], list[Forward]] = {}
    for each in profile.forwards():
        if each.skipped and not each.adapter and each.candidate.startswith("routed") and not each.is_variant:
            name = f"{each.model}, {each.shape.partition(', ')[2]}, {each.candidate.removeprefix('routed ')}"
            lines.setdefault((each.what, name), []).append(each)
    return [
        _forward_row(each, line=name)
        for (_, name), found in lines.items()
        if len({each.group_size for each in found}) >= _MANY_SIZES
        for each in sorted(found, key=lambda each: each.group_size or 0)
    ]


def _breakdown(profile: Profile) -> list[Row]:
    """Return the parts of dense forwards and of those that run as users would run them; larger batches are not."""
    found = [each for each in profile.forwards() if each.parts and not each.is_variant]
    found = [each for each in found if each.batch == min(other.batch for other in found)]
    several = len({each.group_size for each in found}) > 1
    adapters = len({each.adapter for each in found}) > 1
    rows: list[Row] = []
    for each in sorted(found, key=lambda each: each.mean_skipped or 0.0):
        merged = {name: us for name, us in each.parts.items() if name not in _QUERY}
        together = sum(us for name, us in each.parts.items() if name in _QUERY)
        merged |= {"query, key and value": together} if together else {}
        run = Path(each.adapter).parent.name if adapters else ""
        words = [] if each.ceiling is None else [f"{each.speedup:.2f}x of {each.ceiling:.2f}x possible"]
        words += [] if each.layer_us is None else [f"{each.layer_us:,.0f} us a layer"]
        for part in dict.fromkeys((*_PARTS, *merged)):
            if part in merged:
                name = f"{each.model}{f', G {each.group_size}' if several else ''}, {each.shape}, ms"
                bar = f"{each.candidate}{f', {run}' if run else ''}"
                rows.append(_forward_row(each, panel=name, bar=bar, part=part, us=merged[part], words=", ".join(words)))
    return rows


def _decode_groups(profile: Profile) -> list[Row]:
    names = [
        "device",
        "batch",
        "length",
        "active",
        "group_size",
        "group_heads",
        "union",
        "candidate",
        "peer",
        "median_us",
        "speedup",
    ]
    return [
        {
            "panel": f"{each['batch']} sequences, {each['length']:,} keys, {100 * (1 - each['active']):g} % skipped",
            **{name: each.get(name) for name in names},
            "ideal_speedup": 1 / each["union"] if each["candidate"] == "operator" else None,
        }
        for each in sorted(profile.decode_groups(), key=lambda each: int(each["group_size"]))
    ]


def _batches(profile: Profile) -> list[Row]:
    steps = [each for each in profile.forwards() if each.what == "decode" and not each.is_variant]
    lines: dict[tuple[Any, ...], list[Forward]] = {}
    for each in steps:
        lines.setdefault((each.model, each.adapter, each.group_size, each.tokens, each.candidate), []).append(each)
    several = {line: found for line, found in lines.items() if len({each.batch for each in found}) > 1}
    shapes = len({line[3] for line in several}) > 1
    values: dict[str, Callable[[Forward], float | None]] = {
        "speed-up over dense": lambda each: each.speedup,
        "energy, J a token": lambda each: each.energy_per_token_j,
        "peak memory, GiB": lambda each: each.memory_bytes / 2**30 if each.memory_bytes else None,
    }
    rows: list[Row] = []
    for panel, value in values.items():
        for line, found in several.items():
            name = f"{line[4]}{f', {line[3]:,} cached' if shapes else ''}"
            for each in sorted(found, key=lambda each: each.batch):
                ideal = each.ceiling if panel == "speed-up over dense" else None
                rows.append(_forward_row(each, panel=panel, line=name, value=value(each), ideal=ideal))
    return rows


def _naive(profile: Profile) -> list[Row]:
    values = {
        "active_tflops": (1.0, "TFLOP/s"),
        "peak_memory_bytes": (2.0**20, "peak memory, MiB"),
        "accounted_traffic_bytes": (2.0**20, "accounted traffic, MiB"),
    }
    names = [
        "device",
        "axis",
        "size",
        "group_size",
        "active",
        "candidate",
        "error",
        "median_us",
        "speedup",
        "not_run",
        "failure",
    ]
    return [
        {
            "panel": f"{axis}: {label}",
            **{name: each.get(name) for name in (*names, *values, "accounted_storage_bytes")},
            "value": each[metric] / scale if each.get(metric) else None,
        }
        for metric, (scale, label) in values.items()
        for axis in "MNK"
        for each in profile.naive()
        if each["axis"] == axis
    ]


def _depth(profile: Profile) -> list[Row]:
    rows: list[Row] = []
    found = sorted(profile.depth(), key=lambda each: int(each["rows"]))
    several = len({(each["device"], each["active"]) for each in found}) > 1
    for each in found:
        dense = each["median_us"] * each["speedup"]
        rest = each["median_us"] - sum(each["parts_us"].values())
        more = f", {each['device']}, {100 * each['active']:.0f} % execute" if several else ""
        names = ["device", "rows", "width_in", "width_out", "active", "candidate", "error", "median_us", "speedup"]
        for part in _STAGES:
            us = rest if part == "rest" else each["parts_us"].get(part)
            if us is not None:
                rows.append(
                    {
                        "panel": f"product of {each['width_in']} to {each['width_out']}{more}",
                        "bar": f"{each['candidate']}, {each['rows']:,}",
                        **{name: each.get(name) for name in names},
                        "part": part,
                        "us": us,
                        "x dense": us / dense,
                        "words": f"{each['median_us']:,.0f} us, {each['speedup']:.2f}x",
                    }
                )
    return rows


def traffic_table(profile: Profile) -> Table:
    """Return what each way must move and store by the paper's accounting, MiB."""
    found = profile.naive()
    dense = {(r["axis"], r["size"]): r["accounted_traffic_bytes"] for r in found if r["candidate"] == "dense"}
    lines = []
    for record in found:
        moved, peer = record["accounted_traffic_bytes"], dense.get((record["axis"], record["size"]))
        stored = record.get("accounted_storage_bytes")
        words = (f"{moved / 2**20:,.1f}", f"{moved / peer:,.2f}" if peer else "-")
        stored_words = "-" if stored is None else f"{stored / 2**20:,.1f}"
        lines.append((str(record["candidate"]), record["axis"], str(record["size"]), *words, stored_words))
    return Table(header=("way", "axis", "M = N = K", "traffic", "x dense", "storage"), rows=tuple(lines))


def _operators(name: str, title: str, key: Key, column: str, label: str, missing: str) -> Figure[Profile]:
    return Figure(
        name=name,
        title=title,
        rows=lambda profile: required(_operator_rows(profile, key), missing),
        panel="operator",
        x=column,
        y="speedup",
        by="line",
        ideal="ideal_speedup",
        even=True,
        line_at=1.0,
        x_label=label,
        y_label="speed-up over the dense peer",
        about="Speed-up of the fastest agreeing variant of each operator over its dense peer (black line); the CSV "
        "says which variant it is and what it is written in",
        columns=4,
        height=2.8,
    )


def _drawn_forward(rows: Callable[[Profile], Sequence[Row]], missing: str, **more: Any) -> Figure[Profile]:
    usual: dict[str, Any] = {"panel": "what", "y": "speedup", "line_at": 1.0, "y_label": "speed-up over dense"}
    return Figure(rows=lambda profile: required(rows(profile), missing), **(usual | {"columns": 2} | more))


SPEED_FIGURES: tuple[Figure[Profile], ...] = (
    _drawn_forward(
        _end_to_end,
        "no routed candidate in endtoend.json; run wide profile on a GPU",
        name="end-to-end",
        title="Speed-up of whole forwards",
        x="skipped, %",
        y="drawn",
        by="line",
        filled="even",
        filled_means=("attention and FFN alike", "other shares, as named"),
        words="words",
        ideal="ceiling",
        ideal_means="ceiling",
        x_label="skipped groups, mean of attention and FFN, %",
        about="Measured speed-up of whole forwards over the same runtime dense (black line), and the ceiling if "
        "routing cost nothing (dotted)",
    ),
    _drawn_forward(
        _breakdown,
        "no record with 'breakdown_us' in endtoend.json",
        name="breakdown",
        title="Where the time goes",
        kind="stack",
        panel="panel",
        x="bar",
        y="us",
        by="part",
        words="words",
        scale=1e-3,
        line_at=None,
        y_label="",
        about="Time by part of the forward in milliseconds; queries, keys and values may be one kernel's, so that they "
        "are one part",
    ),
    _operators(
        "operators",
        "Speed-up of operators",
        _tokens,
        "tokens",
        "tokens (length of the text for attention); 1k is 1024",
        "no records of operators (operators.json, attention.json); run wide bench on a GPU",
    ),
    _operators(
        "operators-groups",
        "Operators over the size of groups",
        _group,
        "group_size",
        "channels of a group",
        "no operator was timed at several group sizes; run wide bench --operators coarse on a GPU",
    ),
    _operators(
        "operators-sparsity",
        "Operators over sparsity",
        _sparsity,
        "skipped, %",
        "skipped pairs, %",
        "no operator was timed at several sparsities; run wide bench --operators coarse on a GPU",
    ),
    _drawn_forward(
        _decode_groups,
        "no records of decode attention over group sizes; run wide bench --operators decode_groups on a GPU",
        name="decode-groups",
        title="Decode attention over the size of groups",
        panel="panel",
        x="group_size",
        by="candidate",
        even=True,
        ideal="ideal_speedup",
        ideal_means="ideal: needed KV heads",
        x_label="channels of an attention group",
        y_label="speed-up over the dense peer",
        about="Decode attention over the size of groups; a group smaller than a KV head's share of queries reads that "
        "head's cache once for each of its executing groups",
    ),
    _drawn_forward(
        _over_groups,
        f"no forwards over {_MANY_SIZES} sizes of FFN groups; run wide profile once for each --ffn_group_size",
        name="end-to-end-groups",
        title="Whole forwards over the size of groups",
        x="group_size",
        by="line",
        even=True,
        ideal="ceiling",
        ideal_means="ceiling",
        x_label="channels of an FFN group",
        about="Measured speed-up of whole forwards over the size of FFN groups",
    ),
    _drawn_forward(
        _batches,
        "no decode steps of several batches in endtoend.json; run wide profile --batch 1,2,4",
        name="batches",
        title="Batched decode",
        panel="panel",
        x="batch",
        y="value",
        by="line",
        even=True,
        ideal="ideal",
        ideal_means="ceiling",
        x_label="sequences",
        y_label="",
        line_at=None,
        columns=3,
        about="Decode steps of several sequences",
    ),
)
"""Figures of operators and whole forwards."""
NAIVE_FIGURES: tuple[Figure[Profile], ...] = (
    _drawn_forward(
        _naive,
        "no records of naive products (naive.json); run wide bench --operators naive",
        name="naive",
        title="Naive, grouped, fused and dense products",
        panel="panel",
        x="size",
        y="value",
        by="candidate",
        even=True,
        log=True,
        line_at=None,
        x_label="M = N = K",
        y_label="",
        columns=3,
        height=2.6,
        about="Products pruned over tokens, output groups and input groups: throughput, memory, and the traffic of the "
        "paper's accounting; throughput counts executing pairs",
    ),
)
"""Figures of naive beside fused products."""
DEPTH_FIGURES: tuple[Figure[Profile], ...] = (
    _drawn_forward(
        _depth,
        "no timed record of naive dynamic depth (depth.json); run wide bench --operators naive_depth on a GPU",
        name="naive-breakdown",
        title="Where the time of naive dynamic depth goes",
        kind="stack",
        panel="panel",
        x="bar",
        y="x dense",
        by="part",
        words="words",
        x_label="time, x of the dense product",
        y_label="",
        about="Time by stage of a product that whole tokens skip, as a multiple of the dense product's (black line); "
        "each stage was timed by itself, and indices are the time until the host knows which rows execute",
    ),
)
"""Figures of naive dynamic depth taken apart."""
