"""Speeds of the rows of the study of Qwen2.5-Coder-1.5B: dense, routed and static models, all in wide's engine.

Usage: python -m benchmarks.beside [--out FILE] [--seconds 240] [--tiny]

The model has that model's configuration and drawn weights. Static rows keep as many heads and channels of each layer as
the study's records say, heads spread evenly over KV heads; routers are drawn, and their thresholds set on drawn tokens
so that each layer skips the share that its records say. Each row is compared with its masked model first; a row that
differs is not timed. Rows take turns, times are medians, and steps replay CUDA graphs. The file is written after each
figure, the most wanted ones first, and further turns follow while there is time. It holds

- rows: for each row its gate (`wide.profiling.correctness`) and, where routers decide, skipped_prompt and
  skipped_steps (by prompt), measured shares of attention and FFN; or why it failed, which costs no other row, and
  what of it ran masked, which nothing should.
- records: 'what' is 'first token' or 'token' of `generate()` with one sequence, of 'size' prompt tokens, or 'requests',
  of 'size' requests at once in `generate_batch`'s engine; 'value' is in milliseconds or tokens/s. 'samples' counts.
"""

import argparse
import copy
import json
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig, Qwen2Config

import wide
from wide.grouping import Grouping
from wide.models.attach import attachment
from wide.models.discovery import discover
from wide.plan import Dense, Kept, LayerPlan, Plan, Skipped, scale_name
from wide.profiling.calls import Candidate, batch_figures, generate_us
from wide.profiling.correctness import check_decoder, reference
from wide.profiling.synthetic import set_shares, skipped_shares
from wide.records import Cell, Stage, read_records
from wide.report.selection import Selection
from wide.writing import write_whole

_STUDY = Path(__file__).parents[1] / "docs/results/qwen2.5-coder-1.5b/records.jsonl.gz"
ROWS = {
    "dense": "half",
    "wide-fitted": "stable",
    "wide": "half-paper",
    "ddp": "half",
    "tyr": "half",
    "shortened-taylor": "half",
}
"""Methods, and the runs of the study that hold what each layer skips."""
_SIZES = {"hidden_size": 1536, "intermediate_size": 8960, "vocab_size": 151936, "head_dim": 128}
_TINY = {"hidden_size": 48, "intermediate_size": 560, "vocab_size": 256, "head_dim": 16}
_LAYERS, _GROUPS, _HEADS, _KV_HEADS = 28, 70, 12, 2
# What is timed: tokens of a prompt, or requests at once; the most wanted figures first.
_FIGURES = (("prompt", 4096), ("prompt", 16384), ("requests", 32), ("requests", 8), ("requests", 64), ("requests", 1))
_TINY_FIGURES = (("prompt", 40), ("requests", 2))
_NEW, _BATCH_NEW, _BATCH_PROMPT = 64, 128, 1024
_ROUNDS, _TURNS, _GATE_TOKENS, _SET_ON = 3, 5, 640, 2048


def shares(method: str) -> list[tuple[float, float]]:
    """Return what the study's row of a method skips in each layer's attention and FFN, without LoRA."""
    found = Selection([each for each in read_records(_STUDY)[0] if each.run == ROWS[method]])
    stage = Stage(Cell(method, 0.5, 17), recovered=False)
    halves = (dict(found.by_layer(stage, f"sparsity.{half}")) for half in ("attention", "ffn"))
    attention, ffn = halves
    return [(attention[layer], ffn[layer]) for layer in range(_LAYERS)]


def static_plan(model: Any, skipped: list[tuple[float, float]]) -> tuple[Plan, dict[str, Tensor]]:
    """Return a plan that leaves out these shares of each layer's heads and channels, and its tensors."""
    layers, tensors = [], {}
    for spec, given in zip(discover(model), skipped, strict=True):
        halves: dict[str, Any] = {}
        assert spec.ffn is not None
        heads = (spec.attention.query_width, spec.attention.head_dim)
        for half, share, (width, size) in zip(("attention", "ffn"), given, (heads, (spec.ffn.width, 1)), strict=True):
            units = width // size
            kept = round((1 - share) * units)
            halves[half] = Skipped() if not kept else Dense()
            if 0 < kept < units:
                halves[half] = Kept(grouping=Grouping(width, size), kept=kept)
                # One unit of each KV head in turn.
                order = torch.arange(units).view(spec.attention.num_kv_heads, -1).T.flatten()
                tensors[scale_name(spec.index, half)] = torch.zeros(units).index_fill(0, order[:kept], 1.0)
        layers.append(LayerPlan(**halves))
    return Plan(tuple(layers)), tensors


def prepared(base: Any, method: str, ids: Tensor) -> tuple[Any, dict[str, Any]]:
    """Return a copy of a model as a row of the study, optimised, and what its gate and its routers say.

    Args:
        ids: Drawn tokens, [1, T], on which thresholds are set.
    """
    model: Any = copy.deepcopy(base)
    facts: dict[str, Any] = {}
    if method.startswith("wide"):
        size = model.config.intermediate_size // _GROUPS
        wide.attach(model, wide.WideConfig(ffn_group_size=size, router_bias=method == "wide-fitted"))
        # A router that skips nothing would not run.
        set_shares(model, ids, [(min(max(a, 1e-3), 1 - 1e-3), f) for a, f in shares(method)])
        facts["skipped_prompt"] = skipped_shares(model, ids)
    elif method == "dense":
        wide.attach(model, Plan((LayerPlan(attention=Dense(), ffn=Dense()),) * _LAYERS))
    else:
        plan, tensors = static_plan(model, shares(method))
        wide.attach(model, plan, tensors=tensors)
    model.requires_grad_(False)
    known = reference(model, ids[:, :_GATE_TOKENS])
    if not ids.is_cuda:
        wide.optimize(model, backend="torch")
    elif "skipped_prompt" in facts:
        a, f = facts["skipped_prompt"]
        wide.optimize(model, executed=(1 - a, 1 - f), sample=ids)
    else:
        wide.optimize(model)
    gate = check_decoder(attachment(model).engine.decoder, known)
    # The names of kernels would be most of the file.
    return model, facts | {"gate": {name: value for name, value in gate.items() if name != "kernels"}}


class _Race:
    """Rows that take turns, and the file that holds what they took."""

    def __init__(self, out: Path, content: dict[str, Any]) -> None:
        self.out, self.content = out, content
        self.samples: dict[tuple[str, int, str], list[float]] = {}
        self.models: dict[str, Any] = {}

    def add(self, what: str, size: int, row: str, value: float) -> None:
        self.samples.setdefault((what, size, row), []).append(value)

    def rotated(self, turn: int) -> list[tuple[str, Any]]:
        rows = list(self.models.items())
        return rows[turn % len(rows) :] + rows[: turn % len(rows)]

    def prompt(self, ids: Tensor, new: int, turn: int) -> None:
        """Time the first token and each further one of `generate()` after a prompt [1, T]."""
        for row, model in self.models.items() if not turn else ():
            # A prompt's graph is captured when its length comes a second time.
            whole = [generate_us(model, ids, new)[2] for _ in range(2)][1]
            if attachment(model).plan.is_routed:
                facts = self.content["rows"][row].setdefault("skipped_steps", {})
                facts[str(ids.shape[1])] = skipped_shares(model, whole, new)
        for each in range(_ROUNDS):
            for row, model in self.rotated(turn + each):
                first, step, _ = generate_us(model, ids, new)
                self.add("first token", ids.shape[1], row, first * 1e-3)
                self.add("token", ids.shape[1], row, step * 1e-3)

    def requests(self, requests: int, prompt: int, new: int, turn: int) -> None:
        """Time so many requests at once, in a session for each row."""
        for row, model in self.rotated(turn):
            try:
                found = batch_figures(Candidate(name=row, model=model), requests, prompt, new)
            # Kernels and libraries have errors of their own kinds.
            except Exception as error:
                self.content["rows"][row][f"failed {requests} requests"] = _in_words(error)
                continue
            self.add("requests", requests, row, found["tokens_per_s"])

    def write(self) -> None:
        self.content["records"] = [
            {"what": what, "size": size, "row": row, "value": statistics.median(values), "samples": len(values)}
            | {"low": min(values), "high": max(values)}
            for (what, size, row), values in self.samples.items()
        ]
        for row, model in self.models.items():
            if said := sorted(attachment(model).engine._said):
                self.content["rows"][row]["ran masked"] = said
        write_whole(self.out, json.dumps(self.content, indent=1) + "\n")


def main(arguments: list[str] | None = None) -> int:
    """Time the rows; the status is 1 where a gate was red."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("speed.json"), help="the file to write")
    parser.add_argument("--seconds", type=float, default=240, help="after them no further figure is begun")
    parser.add_argument("--tiny", action="store_true", help="small layers and two figures, for a try without a GPU")
    options = parser.parse_args(arguments)
    began = time.monotonic()

    def say(words: str) -> None:
        sys.stdout.write(f"{time.monotonic() - began:4.0f} s  {words}\n")
        sys.stdout.flush()

    torch.manual_seed(17)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    figures, sizes = (_TINY_FIGURES, _TINY) if options.tiny else (_FIGURES, _SIZES)
    alone, new, prompt = (3, 4, 16) if options.tiny else (_NEW, _BATCH_NEW, _BATCH_PROMPT)
    heads = {"num_attention_heads": _HEADS, "num_key_value_heads": _KV_HEADS, "num_hidden_layers": _LAYERS}
    config = Qwen2Config(
        **sizes, **heads, max_position_embeddings=32768, tie_word_embeddings=False, attn_implementation="sdpa"
    )
    with torch.device(device):
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        base: Any = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    base.generation_config = GenerationConfig()
    longest = max(size for what, size in figures if what == "prompt")
    ids = torch.randint(0, config.vocab_size, (1, longest), device=device)
    name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    race = _Race(options.out, {"device": name, "torch": torch.__version__, "weights": "drawn", "rows": {}})
    for row in ROWS:
        try:
            model, facts = prepared(base, row, ids[:, :_SET_ON])
        except Exception as error:
            race.content["rows"][row] = {"failed": _in_words(error)}
            say(f"{row}: {_in_words(error)}")
            continue
        race.content["rows"][row] = facts
        gate = facts["gate"]
        say(f"{row}: {'green' if gate['green'] else 'RED, not timed'}, {_errors(gate)}")
        if gate["green"]:
            race.models[row] = model
    race.write()
    took: dict[tuple[str, int], float] = {}
    for turn in range(_TURNS):
        for figure in figures:
            what, size = figure
            if not race.models or time.monotonic() - began + took.get(figure, 0.0) > options.seconds:
                continue
            start = time.monotonic()
            timed: Callable[[], None] = lambda: race.prompt(ids[:, :size].contiguous(), alone, turn)  # noqa: B023, E731
            if what == "requests":
                timed = lambda: race.requests(size, prompt, new, turn)  # noqa: B023, E731
            timed()
            took[figure] = time.monotonic() - start
            race.write()
            say(f"turn {turn}: {what} {size}")
    race.content["seconds"] = round(time.monotonic() - began)
    race.write()
    for record in race.content["records"]:
        where = f"{record['what']:12s} {record['size']:6d} {record['row']:18s}"
        say(f"{where} {record['value']:10.3f} of {record['samples']}")
    return int(len(race.models) < len(ROWS))


def _in_words(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error)[:300]}"


def _errors(gate: dict[str, Any]) -> str:
    return ", ".join(f"{key} {value:.2g}" for key, value in gate.items() if key.endswith("error"))


if __name__ == "__main__":
    warnings.filterwarnings("ignore", message="wide: operators that skip need a GPU")
    sys.exit(main())
