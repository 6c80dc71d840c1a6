"""What docs/results/lab-88m.md says of budgets, and of why rows are where they are, is what was measured."""

import json
import math
import re
from dataclasses import asdict

from lab_records import BOTH, DOCS, GRIDS, WORD, gap, half_grid, number, subject, tables, times, words_of

from wide.config import StageConfig
from wide.method_config.static import CoopPrunerConfig, DDPConfig, ShortenedConfig, SliceGPTConfig, TyrConfig
from wide.report.comparison import PERPLEXITY

BUDGETS, WHY = "Budgets and deviations", "What it says"
# Where DDP was calibrated: name of the row, grid, seed, target.
DDP_RUNS = [
    *((f"{percent} % nominal", "q-sweep", 17, percent / 100) for percent in (10, 30, 40, 60, 70)),
    ("25 % nominal", "n25", 17, 0.25),
    ("50 % nominal", "n50", 17, 0.5),
    ("50 % nominal, for [equal tokens](#equal-tokens)", "equal", 17, 0.5),
    *((f"50 % nominal, seed {seed}", "seeds", seed, 0.5) for seed in (18, 19)),
    ("a quarter of the work", "f25", 17, 0.25),
    ("half of the work", "f50", 17, 0.5),
]
ENDED = re.compile(r"(\w+): training ended at a soft sparsity of ([\d.]+)% for a target of ([\d.]+)%")


def test_how_far_ddp_was_from_its_target_is_what_its_records_say():
    said, forced = tables(BUDGETS)[1], []
    for name, grid, seed, target in DDP_RUNS:
        text = GRIDS[grid].run.text(subject(grid, "ddp", seed=seed, target=target), "deviations")
        ended = {kind: f"{reached} / {wanted}" for kind, reached, wanted in ENDED.findall(text)}
        assert said.pop(name) == [ended.get(kind, "within 1 point") for kind in ("attention", "ffn")]
        assert ("layers [11], which" in text) == (target in (0.5, 0.6))
        assert ("layers [10, 11], which" in text) == (target == 0.7)
        if name.startswith("50 % nominal"):
            forced += [float(wanted) - float(reached) for _, reached, wanted in ENDED.findall(text)]
    assert said == {}
    assert f"cut {min(forced):.1f} to {max(forced):.1f} points more" in words_of(WHY)


def tyr_reads(iterations, windows, length, generations, offspring, survivors, stage_tokens):
    """Return the tokens that its search reads if every candidate is read anew, statistics and propagation with it."""
    judged = (offspring, survivors[0], survivors[1] + 1)  # The parent joins at the last stage.
    search = sum(models * tokens for models, tokens in zip(judged, stage_tokens, strict=True))
    return iterations * (2 * windows * length + generations * search)


def test_factors_of_the_budgets_are_those_of_settings_and_records():
    def read(method, metric="method.tokens_forward", *, grid=None, recovered=False):
        return number(grid or half_grid(method), method, metric, recovered=recovered)

    def tokens(of):
        return of.steps * of.batch_size * of.sequence_length

    def windows(of):
        return of.num_windows * of.window_length

    paper, tyr, cut, layers = StageConfig(), TyrConfig(), SliceGPTConfig(), windows(ShortenedConfig())
    names = ("iterations", "num_windows", "window_length", "generations", "offspring", "survivors", "stage_tokens")
    used = json.loads(GRIDS["n50"].run.text(subject("n50", "tyr"), "settings"))
    original, ours = (tyr_reads(*(of[name] for name in names)) for of in (asdict(tyr), used))
    deviations = GRIDS["n50"].run.text(subject("n50", "blockpruner"), "deviations")
    assert "64 windows of 512 tokens, the original on 256 of 2048" in deviations
    halves = sum(range(33, 65))  # Of 64 half-layers half go, one after another; each time all that are left are tried.
    candidates = tyr.iterations * tyr.generations * tyr.offspring
    factors = {
        "routers (WIDE, SkipGPT, D-LLM)": tokens(paper) / read("wide", "method.tokens_backward"),
        "LoRA, all rows": tokens(paper) / read("wide", "method.tokens_backward", recovered=True),
        "DDP": tokens(DDPConfig()) / read("ddp"),
        "Týr, tokens read": original / read("tyr"),
        "Týr, candidates of the search": candidates / math.prod(used[n] for n in ("iterations", *names[3:5])),
        "Týr, text of the statistics": windows(tyr) / (used["num_windows"] * used["window_length"]),
        "SliceGPT, Wanda, SparseGPT": windows(cut) / read("slicegpt"),
        "CoopPruner, tokens read": CoopPrunerConfig().num_masks * layers / read("cooppruner"),
        "BlockPruner, tokens read": halves * 256 * 2048 / read("blockpruner"),
        "Shortened, perplexity, tokens read": 32 * layers / read("shortened-ppl"),
        "Shortened, Taylor": layers / read("shortened-taylor"),
    }
    said, told = tables(BUDGETS)[0], words_of(BUDGETS)
    assert {name: cells[-1] for name, cells in said.items()} == {
        n: f"{value:.2g}" if value < 10 else f"{value:.0f}" for n, value in factors.items()
    }
    assert said["Týr, tokens read"][:2] == [f"{original / 1e6:.0f} M", f"{read('tyr') / 1e6:.1f} M"]
    others = [original / read("tyr", grid=grid) for grid in ("n25", "f50")]
    assert "{:.1f} (25 %) to {:.1f} (half of the work)".format(*others) in told
    assert f"(Týr's rule would give {ours / 1e6:.0f} M here, a factor of {original / ours:.1f})" in told
    assert f"{halves} x 256" in said["BlockPruner, tokens read"][0]
    for name, method, size in (("CoopPruner", "cooppruner", layers), ("BlockPruner", "blockpruner", 64 * 512)):
        assert said[f"{name}, tokens read"][1].startswith(f"{read(method) / size:.0f} x")


def test_what_is_said_of_why_is_joined_from_the_records():
    said = words_of(WHY)
    for one, other, told in (
        ("wide", "tyr", "{above:.1f} ± {error:.1f} % behind"),
        ("wide-fitted", "tyr", "{below:.1f} ± {error:.1f} % ahead of Týr with LoRA"),
    ):
        grid = "f50-fitted" if one == "wide-fitted" else "f50"
        ratio, error = times((grid, one, {"recovered": True}), ("f50", other, {"recovered": True}))
        assert told.format(above=100 * (ratio - 1), below=100 * (1 - ratio), error=100 * error) in said
    ratio, _ = times(("f25", "wide", {"recovered": True}), ("f25", "tyr", {"recovered": True}))
    assert f"**At a quarter of the work it is ahead by {100 * (ratio - 1):.1f} %**" in said
    ratio, error = times(("f50-fitted", "wide-fitted", {"recovered": True}), ("f50", "wide", {"recovered": True}))
    assert f"the {ratio:.3f} ± {error:.3f} times between the two recipes" in said
    moves = [
        [number(grid, "wide", metric, recovered=r) / number(grid, "tyr", metric, recovered=r) for r in BOTH]
        for metric in (PERPLEXITY, WORD)
        for grid in ("f50", "n50", "n25", "f25")
    ]
    half, nominal, quarter, of_work, *words = [f"from {before:.2f} to {after:.2f}" for before, after in moves]
    assert f"{half} at half of the work ({nominal} at 50 % nominal, {quarter} at 25 %, {of_work} at a quarter" in said
    assert f"by word {words[0]} ({', '.join(words[1:])})" in said


def test_gains_at_equal_rates_are_those_of_the_records():
    records = DOCS / "measurements/records"
    recipes = json.loads((records / "lab-recipes.json").read_text())
    runs = [*recipes["runs"], *json.loads((records / "lab-benchmark.json").read_text())["runs"]]
    found = {run["run"]: run["token_perplexity"] for run in runs if run.get("stage", run.get("subject")) == "stage 1"}
    gaps = {run: gap(value, recipes["dense_token_perplexity"]) for run, value in found.items()}
    said = words_of("A better recipe than the paper's")
    assert f"(2e-3: -{100 * (1 - gaps['cluster_lr2e-3'] / gaps['base']):.0f} %)" in said
    assert f"falls by {100 * (1 - gaps['cluster_smooth_lr1e-2'] / gaps['lr1e-2']):.0f} %)" in said
    shares = [f"-{100 * (1 - gaps[run] / gaps['base']):.0f}" for run in ("cluster_lr2e-3", "all_lr2e-3")]
    assert f"(2e-3: from {shares[0]} to {shares[1]} %)" in said
    quality = json.loads((records / "lab-quality.json").read_text())
    finer = next(e for e in quality if (e["run"], e["stage"]) == ("flops50_g32", "stage 1"))
    told = f"go from {found['base']:.2f} to {found['cluster_lr2e-3']:.2f}, further than adjacent groups of 32"
    assert told in words_of(WHY)
    assert f"[{finer['heldout_token_perplexity']:.2f}]" in words_of(WHY)
