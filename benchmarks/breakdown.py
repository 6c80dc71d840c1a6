"""Where a layer's time goes in a prompt and in a token, dense and routed in the same engine, part by part.

Usage: wide bench --operators breakdown --output DIR

Llama-3.1-8B's shapes, random weights, a share of the groups skipped. Results are checked first. Whole calls are timed
by the wall clock, dense and routed in turns; further ones are traced for their kernels. breakdown.json holds

- gates: what the gate of each prompt found (`wide.profiling.correctness`); nothing is timed behind a red one.
- records: tokens of the prompt, what ('prompt': a call of the model; 'token': of `generate()` behind that prompt),
  candidate, part, and us: microseconds of the whole call in that part, divided by the number of layers. Kernels that
  are not known count as 'head, rest'.
- calls: whole calls: median_us, low_us, high_us (tenth and ninetieth percentiles), num_samples, speedup over 'dense'.

Source: paper, section 4.3 (the upper bound of speed-up).
"""

import json
import re
import statistics
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

import wide
from wide.errors import ConfigError, EvaluationError
from wide.models.attach import attachment
from wide.models.having import having
from wide.profiling.calls import DENSE, FORWARD, STEP, Candidate, generate_us, race_calls
from wide.profiling.correctness import check_decoder, reference
from wide.profiling.synthetic import SHAPES, random_model, set_shares
from wide.runs.process import say
from wide.writing import write_whole

ATTENTION, NORMS, SORTS, SMALL = "attention", "norms, routers", "sorts", "elementwise"
SKIPPING = ("Q, K, V", ATTENTION, "output", "gate, up", "down")
OUTSIDE, IDLE = "head, rest", "idle"
PARTS = (*SKIPPING, NORMS, SORTS, SMALL, OUTSIDE, IDLE)
"""Where time goes; tokens skip work in the first five, of which K and V are never skipped."""
_PRODUCT = "product"
# What the names of kernels contain; the first kind that fits counts. Lists of what executes are sorts.
_LISTS = ("_transpose_k", "_place_", "_histogram_", "_sort_", "_tiles_", "_one_list_", "_unions_", "_items_", "rows_")
_KINDS = {
    ATTENTION: ("attention", "attend_", "_merge_parts", "flash", "fmha", "sdpa"),
    SORTS: _LISTS,
    NORMS: ("_rms_norm", "_route"),
    SMALL: ("_rope_to_cache", "_gated_", "_clear_skipped", "FillFunctor<c10", "Memset"),
    _PRODUCT: ("nvjet", "gemm", "gemv", "cutlass", "splitK", "_drain_"),
}
# A layer, and what follows the last one. Kernels may end a product, and one over groups of inputs comes in slabs.
_SUM = "P(?:p+P)*p*"
_ORDER = re.compile(f"N(?P<qkv>[Pp]+)(?P<attention>A+)(?P<output>{_SUM})N(?P<gated>Pp*)(?P<down>{_SUM})|N(?P<head>Pp*)")
_CALIBRATED, _NEW_TOKENS, _TURNS = 2048, 33, 4


def _kind(name: str) -> str:
    return next((kind for kind, words in _KINDS.items() if any(word in name for word in words)), OUTSIDE)


def _letter(name: str, kind: str) -> str:
    """Return how a kernel stands in `_ORDER`: norms that begin a sublayer, attention, products, their last parts."""
    if kind == NORMS:
        return "N" if "_rms_norm" in name or "_route_few" in name else ""
    if kind == _PRODUCT:
        return "p" if "splitKreduce" in name or "_drain_" in name else "P"
    return "A" if kind == ATTENTION else ""


def forwards(kernels: Iterable[tuple[str, float, float]]) -> list[dict[str, float]]:
    """Return the time of each part, of each of the forwards that a trace holds.

    Args:
        kernels: Names, starts and times, in the order of their start. Of which product a kernel is, is told by its
            place in a layer; what comes between two forwards counts to the later one.

    Raises:
        EvaluationError: If the order is none of the engine's.
    """
    named = [(_kind(name), name, start, spent) for name, start, spent in kernels]
    places = [(index, letter) for index, (kind, name, *_) in enumerate(named) if (letter := _letter(name, kind))]
    order = "".join(letter for _, letter in places)
    parts, ends, last = [kind for kind, *_ in named], [0], 0
    for found in _ORDER.finditer(order):
        if found.start() != last:
            break
        last = found.end()
        for part, group in zip((*SKIPPING, OUTSIDE), found.re.groupindex, strict=True):
            for place in range(*found.span(group)):
                parts[places[place][0]] = part
        if found["head"]:
            ends.append(places[last - 1][0] + 1)
    if last != len(order) or len(ends) == 1:
        raise EvaluationError(f"kernels in an order that no layer has, from {order[last : last + 20]!r} on")
    # What follows the last head, such as the choice of the token, belongs to it.
    ends[-1] = len(named)
    sums, busy = [dict.fromkeys(PARTS, 0.0) for _ in ends[1:]], named[0][2]
    for index, (part, (_, _, start, spent)) in enumerate(zip(parts, named, strict=True)):
        forward = sums[bisect_right(ends, index) - 1]
        forward[part] += spent
        forward[IDLE] += max(0.0, start - busy)
        busy = max(busy, start + spent)
    return sums


def _traced(candidates: Sequence[Candidate], call: Callable[[], object]) -> list[list[dict[str, float]]]:
    """Return the forwards of a call of each candidate: of the last of some turns, at the clocks that turns have."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(_TURNS):
            for each in candidates:
                with each.within():
                    call()
        torch.cuda.synchronize()
    events = [event for event in profiler.events() if event.device_type.name == "CUDA"]
    events.sort(key=lambda event: event.time_range.start)
    found = forwards((event.name, event.time_range.start, event.device_time) for event in events)
    count, rest = divmod(len(found), _TURNS * len(candidates))
    if rest:
        raise EvaluationError(f"{len(found)} forwards were traced, which {_TURNS * len(candidates)} calls cannot share")
    return [found[len(found) - count * place :][:count] for place in range(len(candidates), 0, -1)]


@torch.no_grad()
def measure(model: Any, ids: torch.Tensor, *, quick: bool) -> dict[str, list[dict[str, Any]]]:
    """Return `records` and `calls` of a prompt [1, T] of an optimised model with routers."""
    candidates = [Candidate(name=DENSE, model=model, is_dense=True), Candidate(name="routed", model=model)]
    times, _ = race_calls(candidates, ids, _NEW_TOKENS, calls=("forward", "generate"), quick=quick)
    found: dict[str, list[dict[str, Any]]] = {"records": [], "calls": []}
    prompts = _traced(candidates, lambda: model(input_ids=ids, use_cache=False, logits_to_keep=1))
    answers = _traced(candidates, lambda: generate_us(model, ids, _NEW_TOKENS))
    for each, prompt, answer in zip(candidates, prompts, answers, strict=True):
        # The first forward of an answer is its prompt.
        for what, call, traced in (("prompt", FORWARD, prompt), ("token", STEP, answer[1:])):
            fact = {"tokens": ids.shape[1], "what": what, "candidate": each.name}
            timing = times[each.name][call]
            dense = times[DENSE][call].median_us
            found["calls"].append(fact | asdict(timing) | {"speedup": dense / timing.median_us})
            layers = model.config.num_hidden_layers
            parts = {part: statistics.mean(one[part] for one in traced) / layers for part in PARTS}
            found["records"] += [fact | {"part": part, "us": round(us, 3)} for part, us in parts.items()]
    return found


def run(
    out: Path,
    *,
    rows: Sequence[int] = (16384,),
    group_size: int = 128,
    sparsity: float = 0.5,
    quick: bool = False,
    shape: str = "llama-3.1-8b",
) -> bool:
    """Check and time a model on a GPU, write breakdown.json after each prompt, and return whether the gates were green.

    Raises ConfigError if a prompt is longer than the model's positions.

    Args:
        out: Folder.
        rows: Tokens of prompts.
        group_size: Channels in a group of the FFN.
        sparsity: Share of attention and FFN that is skipped.
        quick: Fewer samples.
        shape: One of `wide.profiling.synthetic.SHAPES`.
    """
    most = SHAPES[shape]["max_position_embeddings"] - _NEW_TOKENS
    if max(rows) > most:
        raise ConfigError(f"rows must leave room for {_NEW_TOKENS} tokens, got {max(rows)}; at most {most}")
    torch.manual_seed(17)
    model = random_model(shape, num_layers=None, device=torch.device("cuda"), dtype=torch.bfloat16)
    model.generation_config.eos_token_id = None
    ids = torch.randint(0, model.config.vocab_size, (1, max(rows)), device="cuda")
    wide.attach(model, wide.WideConfig(ffn_group_size=group_size)).requires_grad_(False)
    content: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "model": shape}
    content |= {"ffn_group_size": group_size, "skipped": f"{sparsity:g}", "layers": model.config.num_hidden_layers}
    content |= {"gates": [], "records": [], "calls": []}
    out.mkdir(parents=True, exist_ok=True)
    set_shares(model, ids[:, :_CALIBRATED], (sparsity, sparsity))
    wide.optimize(model, executed=(1.0 - sparsity, 1.0 - sparsity))
    for length in rows:
        with having(model, forward=partial(type(model).forward, model)):
            masked = reference(model, ids[:, :length])
        content["gates"].append(check_decoder(attachment(model).engine.decoder, masked))
        del masked
        green = bool(content["gates"][-1]["green"])
        if green:
            for kind, found in measure(model, ids[:, :length], quick=quick).items():
                content[kind] += found
        say(_lines(content["records"], length) if green else f"RED, nothing is timed: {length} tokens")
        # Written after each prompt, so that a stopped run keeps what it measured.
        write_whole(out / "breakdown.json", json.dumps(content, indent=1) + "\n")
        if not green:
            return False
    return True


def _lines(records: Sequence[dict[str, Any]], length: int) -> str:
    """Return the parts of a prompt and of a token as a table, in microseconds a layer."""
    found = {(row["what"], row["candidate"], row["part"]): row["us"] for row in records if row["tokens"] == length}
    columns = [(what, candidate) for what in ("prompt", "token") for candidate in (DENSE, "routed")]
    head = "".join(f"{f'{what}, {candidate}':>16}" for what, candidate in columns)
    lines = (f"{part:28}{''.join(f'{found[*column, part]:16.1f}' for column in columns)}" for part in PARTS)
    return "\n".join((f"{f'{length} tokens, us a layer':28}{head}", *lines))
