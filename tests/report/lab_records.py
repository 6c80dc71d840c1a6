"""What tests of docs/results/lab-88m.md share: the page, the records of its grids, and figures as it writes them."""

import functools
import itertools
import json
import math
import statistics
from pathlib import Path

from wide.report.bootstrap import ratio_error
from wide.report.comparison import DENSE, PERPLEXITY, Row
from wide.report.comparison_page import read_comparison

DOCS = Path(__file__).parents[2] / "docs"
LAB = DOCS / "results/lab-88m"
PAGE = (DOCS / "results/lab-88m.md").read_text()
EARLIER = "seeds-fitted-earlier"
GRIDS = {path.parent.name: read_comparison(path) for path in LAB.glob("*/compare.jsonl")}
WORD, WORK, SCORE = "word_perplexity", "sparsity.linear_flops_layers", "accuracy.average"
ALL = {
    "dense": "dense",
    "**WIDE, G = 128, `fitted-50`**": "wide-fitted",
    "**WIDE, G = 32**": "wide-32",
    "**WIDE, G = 64**": "wide-64",
    "**WIDE, G = 128**": "wide",
    "**WIDE-uniform, G = 128**": "wide-uniform",
    "Týr (scaled, below)": "tyr",
    "DDP": "ddp",
    "SliceGPT": "slicegpt",
    "BlockPruner": "blockpruner",
    "CoopPruner": "cooppruner",
    "D-LLM, original form": "dllm-original",
    "Shortened, perplexity": "shortened-ppl",
    "Shortened, Taylor": "shortened-taylor",
    "SkipGPT, original form": "skipgpt-original",
    "SkipGPT (as the WIDE paper runs it)": "skipgpt",
    "D-LLM (layer skip)": "dllm",
}
FEW = ("dense", "wide-fitted", "wide-32", "wide-64", "wide-uniform", "tyr", "ddp", "slicegpt", "skipgpt")
NAMES = {name: method for name, method in ALL.items() if method in FEW} | {"**WIDE, G = 128, as published**": "wide"}
BOTH = (False, True)
SEEDS = (17, 18, 19)
SPARSITIES = (0.1, 0.25, 0.3, 0.4, 0.5, 0.6, 0.7)
SHAPES = (("prefill", 1), ("prefill", 64), ("decode", 1), ("decode", 64))


def section(title):
    return PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def words_of(title):
    return " ".join(section(title).split())


def tables(title):
    parts = [part for part in section(title).split("\n\n") if part.startswith("|")]
    lines = [[line.strip("|").split("|") for line in part.splitlines()[2:]] for part in parts]
    return [{row[0].strip(): [cell.strip() for cell in row[1:]] for row in part} for part in lines]


def table(title):
    (found,) = tables(title)
    return found


def subject(grid, method, *, seed=17, recovered=False, target=None):
    usual = 0 if method == DENSE else 0.25 if "25" in grid else 0.5
    return f"{method}/{usual if target is None else target}/{seed}/{'recovered' if recovered else 'calibrated'}"


def number(grid, method, metric, **options):
    return GRIDS[grid].run.number(subject(grid, method, **options), metric)


def times(one, other):
    """Return the perplexity of one model over another's, and its error over windows that both share."""
    found = []
    for grid, method, options in (one, other):
        text = GRIDS[grid].run.text(subject(grid, method, **options), f"{PERPLEXITY}.windows")
        found.append((number(grid, method, PERPLEXITY, **options), json.loads(text)))
    (value, windows), (reference, shared) = found
    return value / reference, ratio_error(windows, shared)


# Of seeds 17, 18 and 19.
OF_SEEDS = {
    "wide-fitted": ("n50-fitted", "seeds-fitted-18", "seeds-fitted"),
    "tyr": ("n50", "seeds-tyr-18", "seeds-tyr"),
    "slicegpt": ("n50-rest", "seeds", "seeds"),
}


# The same at half of the work.
HALF_SEEDS = {
    "wide-fitted": ("f50-fitted", "f50-seeds-fitted", "f50-seeds-fitted"),
    **dict.fromkeys(("tyr", "wide", "ddp"), ("f50", "f50-seeds", "f50-seeds")),
}


def of_seeds(method, metric, *, recovered=False, grids=None):
    runs = zip(grids or OF_SEEDS.get(method, ("n50", "seeds", "seeds")), SEEDS, strict=True)
    return [number(grid, method, metric, seed=seed, recovered=recovered) for grid, seed in runs]


def spread(values, digits):
    values = [value for value in values if value is not None]
    return f"{statistics.fmean(values):.{digits}f} ± {statistics.stdev(values):.{digits}f}"


def gap(value, dense):
    return math.log(value / dense)


def quarter_grid(method):
    return "n25-fitted" if method == "wide-fitted" else "n25"


def half_grid(method):
    again = ("slicegpt", "cooppruner", "shortened-ppl", "shortened-taylor", "dllm-original")
    return "n50-fitted" if method == "wide-fitted" else "n50-rest" if method in again else "n50"


def cell(value, error=None):
    if value is None:
        return "-"
    digits = 2 if value < 100 else 1 if value < 1000 else 0
    return f"{value:.{digits}f} ± {error:.{digits}f}"


def measured(grid, method, *, target=0.5, recovered=False):
    return GRIDS[grid].value(Row(method, recovered), 0.0 if method == DENSE else target, PERPLEXITY)


def over_dense(grid, method, options, partner):
    ratio, error = times((grid, method, options), (partner, DENSE, options))
    digits = 3 if ratio < 2.5 else 2 if ratio < 10 else 1
    return f"{ratio:.{digits}f} ± {error:.{digits}f}"


def word(grid, method, *, recovered):
    value = number(grid, method, WORD, recovered=recovered)
    return f"{value:.{1 if value < 1000 else 0}f}"


@functools.cache
def swept(method, target, metric, recovered):
    between = "q-sweep-fitted" if method == "wide-fitted" else "q-sweep"
    grid = {0.25: quarter_grid(method), 0.5: half_grid(method)}.get(target, between)
    options = {"recovered": recovered, "target": target}
    if number(grid, method, PERPLEXITY, **options) is None:
        return None
    return measured(grid, method, **options) if metric == PERPLEXITY else number(grid, method, metric, **options)


def at_work(method, at, recovered):
    """Return a method's perplexity at a share of the work, between two columns of the sweep, None outside of it."""
    works, values = ([swept(method, t, metric, recovered) for t in SPARSITIES] for metric in (WORK, PERPLEXITY))
    points = [(work, math.log(found.mean)) for work, found in zip(works, values, strict=True)]
    for (left, low), (right, high) in itertools.pairwise(points):
        if left <= at <= right:
            return math.exp(low + (high - low) * (at - left) / (right - left))
    return None
