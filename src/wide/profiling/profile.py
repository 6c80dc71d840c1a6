"""Whole models on a GPU through their public calls: a correctness gate first, then the dense model beside the pruned.

Candidates of a routed model are the dense model 'as loaded', the 'dense' model in the optimised one's engine (the
strongest dense peer), and the optimised one: 'routed A/F' by the shares that random routers skip, 'own routing' of an
adapter, or 'pruned' where an adapter's plan is static.

endtoend.json is written after every shape. Beside the facts of the run it holds

- gate, and batch_gate of several sequences at once (the latest ones), starts: for each sparsity what the gate found
  (`wide.profiling.correctness`), and what the beginning takes: optimize_s and first_call_s (a first `generate()` of two
  tokens, compiling and capturing included), seconds; memory_beyond_dense_bytes, at that call, graphs included;
  saved_bytes, by which weights in int8 are smaller; bare_step_us, a step replayed without `generate()` around it;
  skipped_prompt and skipped_steps, shares of attention and FFN that were skipped, measured.
- records: 'what' is 'prefill' (a call of the model) or 'decode' (a step of `generate()` with half of the new tokens
  cached), first_tokens: 'what' is 'first token'. Each has tokens, batch, candidate, median_us, low_us and high_us
  (tenth and ninetieth percentiles), num_samples, speedup (over 'dense'), speedup_as_loaded, skipped (wanted; of an
  adapter measured), skipped_measured, runtime (the call) and peak_memory_bytes (weights, caches and what is computed,
  of that model alone).
- batched, batched_gate: requests at once, prompt, generate, candidate, tokens_per_s, and both speed-ups.
- finished: true, once all is timed.

Candidates are interleaved and times are medians; in `generate_batch` sessions of one candidate each take turns, so that
memory holds one cache. The model as loaded is timed at the first sparsity, and in `generate_batch` for one request, in
one session. Sequences of a batch differ.
"""

import copy
import itertools
import json
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from wide.config import WideConfig
from wide.data.corpus import load_documents
from wide.data.documents import first_documents
from wide.data.tokenizer import load_tokenizer
from wide.inference.choice.tuning.timing import Timing, time_interleaved
from wide.inference.engine.layer import ForwardOptions
from wide.inference.optimize import deoptimize, optimize
from wide.models.adapter import load
from wide.models.attach import attach, attachment, is_attached, plan_of
from wide.models.having import having
from wide.models.lora import merge_lora
from wide.models.observe import now
from wide.models.pretrained import load_pretrained
from wide.plan import Dense
from wide.profiling import calls
from wide.profiling.correctness import check_batch, check_decoder, reference
from wide.profiling.options import ProfileOptions
from wide.profiling.synthetic import random_model, set_shares, skipped_shares
from wide.writing import write_whole

_CALIBRATED, _MOST_REQUESTS_AS_LOADED = 2048, 1
# Wrong kernels agree on nothing. Routers decide in two layers: behind many random ones rounding decides.
# Prompts alone are so long that int8 rounds them as it rounds a batch of them.
_AGREEMENT_LAYERS, _AGREEMENT_PROMPT, _AGREEMENT_TOKENS, _AGREEMENT_SHARE, _AGREEMENT_KNOWN = 2, 512, 32, 0.9, 0.95
_MILLI = 1e-3
Say = Callable[[str], None]
Record = dict[str, Any]


def run_profile(options: ProfileOptions, out: Path, *, device: torch.device, say: Say, backend: str = "auto") -> bool:
    """Check and time a model, write endtoend.json after every shape, and return whether all gates were green.

    The backend 'torch' is for a try without a GPU. Raises EvaluationError if `generate()` or a batch fails.
    """
    out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(17)
    return _Profile(options, device, backend, _Report(options, out / "endtoend.json", say)).run()


def _dense_model(options: ProfileOptions, device: torch.device) -> Any:
    """Return the model without routers, in evaluation mode, that never ends a text by itself."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    if options.model is None:
        shape = options.shape or "llama-3.1-8b"
        model = random_model(shape, num_layers=options.layers, device=device, dtype=dtype)
    else:
        model = load_pretrained(options.model, dtype=str(dtype).removeprefix("torch."), device=str(device))
    model.requires_grad_(False)
    # Of what a base says of generation nothing is to count: no last token, no beams.
    model.generation_config = GenerationConfig()
    return model.eval()


def _pruned_model(options: ProfileOptions, dense: Any) -> Any:
    """Return a copy of a model with the adapter's plan, or random routers."""
    model = copy.deepcopy(dense)
    if options.adapter is not None:
        model = load(model, options.adapter)
        if attachment(model).lora is not None:
            merge_lora(model)
    if not is_attached(model):
        attach(model, WideConfig(ffn_group_size=options.ffn_group_size or 128))
    model.requires_grad_(False)
    return model.eval()


def _prompts(options: ProfileOptions, model: Any) -> Tensor:
    """Return prompts [most sequences, most tokens], all different: of the text, repeated as needed, or random."""
    batch, count, device = max(options.batches), max(options.prompts), model.device
    if options.text is None or options.model is None:
        return torch.randint(0, model.config.vocab_size, (batch, count), device=device)
    tokenizer = load_tokenizer(options.model)
    documents = first_documents(load_documents(options.text, tokenizer=tokenizer), batch * count)
    ids = torch.tensor(tokenizer("\n\n".join(each.text for each in documents))["input_ids"], device=device)
    # Sequences that are alike would skip alike, which batches do not.
    starts = torch.arange(batch, device=device) * max(1, ids.numel() // batch)
    rows = ids[(starts[:, None] + torch.arange(count, device=device)) % ids.numel()]
    rows[:, 0] = ids[0]  # BOS, where the tokenizer has it.
    return rows


class _Report:
    """What endtoend.json holds, written after every shape so that a stopped run keeps what it measured."""

    def __init__(self, options: ProfileOptions, file: Path, say: Say) -> None:
        self._file, self.say = file, say
        self._began = time.perf_counter()
        device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
        self.content: dict[str, Any] = {"device": device, "torch": torch.__version__, "model": options.name}
        self.content["weights"] = options.weights
        self.content |= {"quick": options.quick, "adapter": options.adapter, "records": []}

    def begin(self, name: str, gate: Mapping[str, Any], start: Mapping[str, Any], **facts: Any) -> bool:
        """Write a gate and what the beginning took, and return whether anything may be timed."""
        self.content |= {name: gate} | facts
        if start:
            self.content.setdefault("starts", []).append({**start, "gate": gate})
        self._write()
        self.say(f"{'gate of generate_batch' if name == 'batched_gate' else name}: {json.dumps(gate)}")
        if start:
            self.say(f"start: {json.dumps(start)}")
        if not gate["green"]:
            self.say("RED: what is to be timed does not compute what the model computes; nothing is timed")
        return bool(gate["green"])

    def add(self, kind: str, found: Sequence[Record]) -> None:
        self.content.setdefault(kind, []).extend(found)
        self._write()
        for record in found:
            self.say(_line(record))
        self.say(f"({time.perf_counter() - self._began:.0f} s)")

    def finish(self) -> None:
        self.content["finished"] = True
        self._write()

    def _write(self) -> None:
        write_whole(self._file, json.dumps(self.content, indent=1) + "\n")


def _line(record: Record) -> str:
    over = [f"x{record['speedup']:.3f} dense"] if record.get("speedup") else []
    over += [f"x{record['speedup_as_loaded']:.2f} as loaded"] if record.get("speedup_as_loaded") else []
    name = f"{record['candidate']:16s}"
    if "tokens_per_s" in record:
        figures = f"{record['tokens_per_s']:9.1f} tokens/s"
        return f"generate_batch {record['requests']:4d} requests {name} {figures}  {', '.join(over)}"
    spread = f"[{record['low_us'] * _MILLI:.3f}-{record['high_us'] * _MILLI:.3f}]"
    figures = f"{record['median_us'] * _MILLI:10.3f} ms {spread:20s}"
    return f"{record['what']:11s} B={record['batch']:<3d} T={record['tokens']:<6d} {name} {figures} {', '.join(over)}"


def _record(
    what: str, tokens: int, batch: int, name: str, times: Mapping[str, Timing], memory: int, runtime: str
) -> Record:
    """Return what every record of a race says; `times` are of the candidates by name."""
    timing = times[name]
    record: Record = {"what": what, "tokens": tokens, "batch": batch, "candidate": name}
    record |= asdict(timing)
    for field, peer in (("speedup", calls.DENSE), ("speedup_as_loaded", calls.AS_LOADED)):
        if peer in times:
            record[field] = times[peer].median_us / timing.median_us
    return record | {"metric": "TPOT" if what == "decode" else "TTFT", "runtime": runtime, "peak_memory_bytes": memory}


class _Profile:
    """A dense model as loaded and a copy with routers, through one sparsity after the other, or with a static plan."""

    def __init__(self, options: ProfileOptions, device: torch.device, backend: str, report: _Report) -> None:
        """Load both; only the first is there when its memory is measured."""
        self.options, self.device, self.backend, self.report = options, device, backend, report
        self.dense = _dense_model(options, device)
        self.tokens = _prompts(options, self.dense)
        self.prompt = self.tokens[:1]
        self.first_prompt = self.prompt[:, : self.options.prompts[0]]
        self.weight_bytes = torch.cuda.memory_allocated()
        calls.reset_peak()
        calls.generate_us(self.dense, self.first_prompt, 2)
        self.dense_peak = torch.cuda.max_memory_allocated()
        self.model = _pruned_model(options, self.dense)
        # In the same engine: a static plan's has cut matrices alone. Parameters are those of the model as loaded.
        self.peer: Any = None
        if not attachment(self.model).plan.is_routed:
            if options.weights != "model":
                report.say(f"a static plan runs in the model's dtype, not in {options.weights}")
            self.report.content["weights"] = "model"
            self.peer = copy.deepcopy(self.dense, {id(each): each for each in self.dense.parameters()})
            plan = plan_of(attachment(self.model).specs, lambda *_: Dense())
            optimize(attach(self.peer, plan), backend=backend)
        # What the model as loaded took, by shape; it is timed once.
        self.as_loaded: dict[tuple[int, int], dict[str, Timing]] = {}
        self.batched_as_loaded: dict[int, float] = {}
        # Tables and numbers of sequences whose gates were green.
        self.checked: set[tuple[Any, int]] = set()

    def run(self) -> bool:
        for wanted in [None] if self.options.adapter is not None else self.options.skipped:
            if not self._start(wanted) or not all(map(self._is_right, sorted({*self.options.batches} - {1}))):
                return False
            for batch, length in itertools.product(self.options.batches, self.options.prompts):
                self._race(length, batch)
            if self.options.requests and not self._race_batches():
                return False
            deoptimize(self.model)
        self.report.finish()
        return True

    def _start(self, wanted: tuple[float, float] | None) -> bool:
        """Set thresholds, optimise, and check what has not been checked with the same tables."""
        state, weights = attachment(self.model), self.report.content["weights"]
        calibrated = self.prompt[:, :_CALIBRATED]
        if wanted is not None:
            set_shares(self.model, calibrated, wanted)
        measured = skipped_shares(self.model, calibrated)
        own = "own routing" if self.peer is None else "pruned"
        self.name = own if wanted is None else f"routed {wanted[0]:g}/{wanted[1]:g}"
        self.skipped = measured if wanted is None else wanted
        start: dict[str, Any] = {"candidate": self.name, "skipped_prompt": measured}
        held = torch.cuda.memory_allocated()
        executed = (1.0 - self.skipped[0], 1.0 - self.skipped[1]) if self.peer is None else (1.0, 1.0)
        began = time.perf_counter()
        with warnings.catch_warnings():
            if not any(self.skipped):
                # There is nothing to measure, and that no operator pays is no news.
                warnings.simplefilter("ignore")
            optimize(self.model, backend=self.backend, weights=weights, executed=executed, tune=any(self.skipped))
        start["optimize_s"] = now(self.device) - began
        # What a static plan leaves of the matrices, which the dense peer does not need.
        self.cut_bytes = torch.cuda.memory_allocated() - held
        before = torch.cuda.memory_allocated()
        # Masked, and already with the weights that the engine has.
        with having(self.model, forward=partial(type(self.model).forward, self.model)):
            is_trained = self.options.adapter is not None
            known = reference(self.model, self.prompt, trained=is_trained, by_layer=weights == "w8a8")
        held = torch.cuda.memory_allocated() - before
        torch.cuda.empty_cache()
        calls.reset_peak()
        began = time.perf_counter()
        calls.generate_us(self.model, self.first_prompt, 2)
        start["first_call_s"] = time.perf_counter() - began
        # Both peaks hold one model and its cache; this one the other model's weights and the reference, too.
        beyond = torch.cuda.max_memory_allocated() - held - self.weight_bytes - self.dense_peak
        start["memory_beyond_dense_bytes"] = beyond + _graph_bytes()
        decoder = state.engine.decoder
        start["saved_bytes"] = decoder.saved_bytes
        start["bare_step_us"] = self._bare_step_us(decoder)
        gate = self.report.content.get("gate", {})
        if (decoder.tables, 1) not in self.checked:
            gate = check_decoder(decoder, known)
            self.checked.add((decoder.tables, 1))
        del known
        whole = calls.generate_us(self.model, self.first_prompt, self.options.generate)[2]
        start["skipped_steps"] = skipped_shares(self.model, whole, self.options.generate)
        self.measured = {"prefill": measured, "first token": measured, "decode": start["skipped_steps"]}
        torch.cuda.empty_cache()
        ffn = next((r for r in state.routers() if r.half_layer == "ffn"), None)
        width = getattr(self.model.config.get_text_config(), "intermediate_size", None)
        facts = {"layers": len(state.specs), "method": state.provenance.get("method", {}).get("method", "wide")}
        if ffn is not None and width:
            facts["ffn_group_size"] = width // ffn.num_groups
        return self.report.begin("gate", gate, start, **facts)

    def _is_right(self, batch: int) -> bool:
        """Return whether so many sequences at once give what each of them gives alone, by the tables of now."""
        decoder = attachment(self.model).engine.decoder
        if (decoder.tables, batch) in self.checked:
            return True
        self.checked.add((decoder.tables, batch))
        ids = self.tokens[:batch, : self.options.prompts[0]]
        gate = check_batch(self.model, decoder, ids, trained=self.options.adapter is not None)
        torch.cuda.empty_cache()
        return self.report.begin("batch_gate", gate, {})

    def _bare_step_us(self, decoder: Any) -> float | None:
        """Return the microseconds of a step replayed without `generate()` around it, after the first prompt."""
        if not self.first_prompt.is_cuda:
            return None
        length = self.first_prompt.shape[1]
        cache = decoder.new_cache(1, length + 8)
        decoder.prompt(self.first_prompt, cache, ForwardOptions())

        def step() -> Tensor:
            cache.lengths.fill_(length)
            return decoder.step(self.first_prompt[:, -1], cache, ForwardOptions())  # type: ignore[no-any-return]

        return time_interleaved({"step": step}, rounds=10)["step"].median_us

    def _candidates(self, *, as_loaded: bool = False) -> list[calls.Candidate]:
        return [
            *([calls.Candidate(name=calls.AS_LOADED, model=self.dense)] if as_loaded else []),
            calls.Candidate(name=calls.DENSE, model=self.peer or self.model, is_dense=self.peer is None),
            calls.Candidate(name=self.name, model=self.model, skipped=self.skipped),
        ]

    def _race(self, length: int, batch: int) -> None:
        ids = self.tokens[:batch, :length].contiguous()
        known = self.as_loaded.get((length, batch))
        candidates = self._candidates(as_loaded=known is None)
        asked, quick = self.options.calls_timed, self.options.quick
        times, peaks = calls.race_calls(candidates, ids, self.options.generate, calls=asked, quick=quick)
        if known is None:
            self.as_loaded[length, batch] = known = times[calls.AS_LOADED]
        cached = length + self.options.generate // 2
        for kind, what, call, tokens in (
            ("records", "prefill", calls.FORWARD, length),
            ("first_tokens", "first token", calls.FIRST, length),
            ("records", "decode", calls.STEP, cached),
        ):
            by_name = {calls.AS_LOADED: known} | times
            of_call = {name: found[call] for name, found in by_name.items() if call in found}
            records = []
            for each in candidates if of_call else ():
                memory = peaks[each.name] + (1 if each.name == calls.AS_LOADED else -1) * self.weight_bytes
                memory -= self.cut_bytes if each.model is self.peer else 0
                runtime = "model(...)" if call == calls.FORWARD else "generate()"
                record = _record(what, tokens, batch, each.name, of_call, max(0, memory), runtime)
                if each.skipped is not None:
                    record["skipped"] = _by_half(each.skipped)
                    record["skipped_measured"] = _by_half(self.measured[what])
                records.append(record)
            if records:
                self.report.add(kind, records)
        torch.cuda.empty_cache()

    def _batched_gate(self) -> Record:
        """Compare tokens of `generate_batch` with those that the model prefers: dense in all layers, routed in few."""
        prompt = min(self.options.prompts[0], _AGREEMENT_PROMPT)
        new = min(self.options.batched_generate, _AGREEMENT_TOKENS)
        found = {}
        for each in self._candidates():
            whole = each.is_dense or self.peer is not None
            with each.within(), nullcontext() if whole else attachment(each.model).engine.shortened(_AGREEMENT_LAYERS):
                name = "dense" if each.name == calls.DENSE else "routed" if self.peer is None else "pruned"
                found[name] = calls.batch_agreement(each.model, prompt, new)
        # Two shares of 0 would pass: those of `generate()` must be high of themselves.
        green = all(
            each["generate"] >= _AGREEMENT_KNOWN and each["generate_batch"] >= _AGREEMENT_SHARE * each["generate"]
            for each in found.values()
        )
        return {"green": green, "preferred": found, "routed_layers": _AGREEMENT_LAYERS}

    def _race_batches(self) -> bool:
        """Time `generate_batch` where its tokens agree with those that the model prefers; return whether they do."""
        prompt, new = self.options.prompts[0], self.options.batched_generate
        if not self.report.begin("batched_gate", self._batched_gate(), {}):
            return False
        for requests in self.options.requests:
            is_new = requests <= _MOST_REQUESTS_AS_LOADED and requests not in self.batched_as_loaded
            candidates = self._candidates(as_loaded=is_new)
            figures = calls.race_batches(candidates, requests, prompt, new, quick=self.options.quick)
            torch.cuda.empty_cache()
            if calls.AS_LOADED in figures:
                self.batched_as_loaded[requests] = figures[calls.AS_LOADED]["tokens_per_s"]
            records = []
            for each in candidates:
                rate = figures[each.name]["tokens_per_s"]
                record: Record = {"what": "generate_batch", "requests": requests, "prompt": prompt, "generate": new}
                record |= {"candidate": each.name, **figures[each.name]}
                record["speedup"] = rate / figures[calls.DENSE]["tokens_per_s"]
                if requests in self.batched_as_loaded:
                    record["speedup_as_loaded"] = rate / self.batched_as_loaded[requests]
                if each.skipped is not None:
                    record["skipped"] = _by_half(each.skipped)
                records.append(record)
            self.report.add("batched", records)
        return True


def _by_half(shares: tuple[float, float]) -> dict[str, float]:
    return {"attention": shares[0], "ffn": shares[1]}


def _graph_bytes() -> int:
    """Return the bytes that CUDA graphs keep for their replays, beyond those of living tensors."""
    if not torch.cuda.is_available():
        return 0
    segments = torch.cuda.memory_snapshot()
    return sum(s["total_size"] - s["allocated_size"] for s in segments if tuple(s["segment_pool_id"]) != (0, 0))
