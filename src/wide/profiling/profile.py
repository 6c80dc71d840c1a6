"""Whole models on a GPU: a correctness gate first, then prefills and decode steps, dense beside pruned.

An adapter whose plan is static, and a checkpoint that wide.materialise left, are raced as Hugging Face runs them.
Routed models are raced on the straight-line decoder under random masks at each rate (and under their own routing, where
routers are trained), or, with `optimised`, through the public doors of the Hugging Face model. Times are medians,
candidates interleaved.
"""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from wide.config import WideConfig
from wide.errors import ConfigError
from wide.inference.decoder import Decoder
from wide.inference.layer_sizes import layer_sizes
from wide.inference.measured import measured_table
from wide.inference.operator_table import OperatorTable
from wide.inference.optimize import optimize
from wide.models.attach import attach, attachment, detach, is_attached
from wide.profiling.decoder_races import Bench, compiled_race, decode_race, prefill_race
from wide.profiling.doors import SPARE_PLACES, captured_race, door_race
from wide.profiling.energy import EnergyCounter, energy_counter
from wide.profiling.gates import check_decoder, check_optimised
from wide.profiling.metrics import summarise, summary_table
from wide.profiling.options import ProfileOptions
from wide.profiling.static_pair import PRUNED, Pair, is_static, load_pair, materialise_pair, method_of
from wide.profiling.synthetic import random_model

_PAIR_GATE_TOKENS = 640
_DOOR_ROUNDS, _QUICK_DOOR_ROUNDS = 10, 4
Say = Callable[[str], None]


def run_profile(
    options: ProfileOptions, out: Path, *, device: torch.device, say: Say, is_brief: bool = False, backend: str = "auto"
) -> bool:
    """Check and time a model, write endtoend.json after every shape, and return whether the gate was green.

    Args:
        options: What is timed; `comparison` is not read.
        out: Folder for endtoend.json.
        device: The GPU.
        say: Takes tables and verdicts as they come.
        is_brief: Whether energy and the breakdown by part are left out.
        backend: Of the operators; 'auto' follows measurements, 'torch' is for a try without a GPU.

    Raises:
        ConfigError: If what is asked for does not go with a static plan, or the checkpoint is of another model.
    """
    static = options.checkpoint is not None or (options.adapter is not None and is_static(Path(options.adapter)))
    if static and options.compiled_peer:
        raise ConfigError(
            "the compiled peer is raced beside routed models only, and this plan is static: both models already run as "
            "Hugging Face has them; leave the compiled peer out"
        )
    if static and options.optimised:
        raise ConfigError(
            "--optimised races a routed model as Hugging Face runs it; name an adapter with routers or none, this plan "
            "is static"
        )
    out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(17)
    energy = None if is_brief else energy_counter()
    if energy is None and not is_brief:
        say("energy is not measured: NVML has no energy counter for this GPU")
    job = _Job(options=options, device=device, say=say, energy=energy, parts=not is_brief, backend=backend)
    race = _race_static if static else _race_optimised if options.optimised else _race_routed
    return race(job, _Report(options, out / "endtoend.json", say))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Job:
    """What all kinds of profile share."""

    options: ProfileOptions
    device: torch.device
    say: Say
    energy: EnergyCounter | None
    parts: bool
    backend: str

    def shapes(self) -> Iterator[tuple[str, int, int]]:
        """Yield 'prefill' or 'decode', tokens and sequences; a step is measured with half of the new tokens cached."""
        for batch in self.options.batches:
            yield from (("prefill", length, batch) for length in self.options.prompts)
            yield from (("decode", length + self.options.generate // 2, batch) for length in self.options.prompts)

    @property
    def longest(self) -> int:
        """Most tokens of a sequence in any shape."""
        return max(length for _, length, _ in self.shapes())

    @property
    def method(self) -> str:
        """Which method made the adapter."""
        return "wide" if self.options.adapter is None else method_of(Path(self.options.adapter))

    def model(self, *, attached: bool = True) -> Any:
        """Return the model in evaluation mode, with routers if it is attached; the same weights each time."""
        options = self.options
        torch.manual_seed(17)
        if options.model is None:
            shape = options.shape or "llama-3.1-8b"
            model = random_model(shape, num_layers=options.layers, device=self.device, dtype=_dtype(self.device))
        else:
            from wide.models.pretrained import load_pretrained

            dtype = str(_dtype(self.device)).removeprefix("torch.")
            model = load_pretrained(options.model, dtype=dtype, device=str(self.device))
        if attached and options.adapter is not None:
            from wide.models.adapter import load

            model = load(model, options.adapter)
            if attachment(model).lora is not None:
                from wide.models.lora import merge_lora

                merge_lora(model)
        for parameter in model.parameters():
            parameter.requires_grad_(False)
        if attached and not is_attached(model):
            attach(model, WideConfig(ffn_group_size=options.ffn_group_size or 128))
        return model.eval()

    def tokens(self, model: Any, count: int) -> torch.Tensor:
        """Return [1, count] prompt tokens: of the text, repeated as needed, or random ones."""
        options = self.options
        if options.text is not None and options.model is not None:
            from transformers import AutoTokenizer

            text = Path(options.text).read_text(encoding="utf-8")
            ids = torch.tensor(AutoTokenizer.from_pretrained(options.model)(text)["input_ids"], device=self.device)
            return ids.repeat(-(-count // ids.numel()))[None, :count]
        return torch.randint(0, model.config.vocab_size, (1, count), device=self.device)


def _dtype(device: torch.device) -> torch.dtype:
    return torch.bfloat16 if device.type == "cuda" else torch.float32


class _Report:
    """What endtoend.json holds, written after every shape so that a stopped run keeps what it measured."""

    def __init__(self, options: ProfileOptions, file: Path, say: Say) -> None:
        self.records: list[dict[str, Any]] = []
        self._options, self._file, self._say = options, file, say
        self._began = time.perf_counter()
        self.content: dict[str, Any] = {
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
            "torch": torch.__version__,
            "model": options.name,
            "quick": options.quick,
            "adapter": options.adapter,
            "checkpoint": options.checkpoint,
        }

    def begin(self, gate: dict[str, Any], **facts: Any) -> bool:
        """Write the gate and return whether anything may be timed."""
        self.content |= facts | {"gate": gate, "records": self.records}
        self._write()
        self._say(f"gate: {json.dumps(gate)}")
        if not gate["green"]:
            self._say("RED: what is to be timed does not compute what the model computes; nothing is timed")
        return bool(gate["green"])

    def add(self, found: list[dict[str, Any]]) -> None:
        self.records += found
        self._write()
        self._say(_table(found))
        self._say(f"({time.perf_counter() - self._began:.0f} s)")
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def finish(self) -> bool:
        """Write TTFT, TPOT and TTLT of each candidate; return True."""
        options = self._options
        self.content["summary"] = [
            entry
            for length in options.prompts
            for batch in options.batches
            for entry in summarise(self.records, prompt=length, generate=options.generate, batch=batch)
        ]
        self._write()
        self._say(summary_table(self.content["summary"]))
        return True

    def _write(self) -> None:
        self._file.write_text(json.dumps(self.content, indent=1) + "\n", encoding="utf-8")


def _table(records: Sequence[dict[str, Any]]) -> str:
    lines = ["what      B  tokens  candidate                 median us  [p10-p90]            speed-up  ceiling"]
    for r in records:
        start = f"{r['what']:8s} {r['batch']:2d} {r['tokens']:7d}  {r['candidate']:24s}"
        if "failure" in r:
            lines.append(f"{start} FAIL {r['failure'][:90]}")
            continue
        spread = f"[{r['low_us']:.1f}-{r['high_us']:.1f}]"
        lines.append(f"{start} {r['median_us']:10.1f}  {spread}  x{r['speedup']:.3f}  {r.get('ceiling', 1.0):.2f}")
        if "breakdown_us" in r:
            lines.append("  " + ", ".join(f"{name} {value:.0f}" for name, value in r["breakdown_us"].items()))
    return "\n".join(lines)


def _race_static(job: _Job, report: _Report) -> bool:
    options = job.options
    name, dtype = str(options.model), str(_dtype(job.device)).removeprefix("torch.")
    pair: Pair
    if options.checkpoint is not None:
        # A checkpoint does not say what made it.
        method = ""
        pair = load_pair(name, options.checkpoint, dtype=dtype, device=job.device)
    else:
        from transformers import AutoConfig

        method = job.method
        vocabulary = int(AutoConfig.from_pretrained(name).vocab_size)
        ids = torch.randint(0, vocabulary, (1, _PAIR_GATE_TOKENS), device=job.device)
        pair = materialise_pair(name, Path(str(options.adapter)), ids, dtype=dtype, device=job.device)
    if not report.begin(pair.gate(), method=method):
        return False
    tokens = job.tokens(pair.dense, max(options.prompts))
    for what, length, batch in job.shapes():
        ids = tokens[:, : length if what == "prefill" else 1].expand(batch, -1).contiguous()
        models = {"dense": pair.dense, PRUNED: pair.pruned}
        report.add(captured_race(models, what, ids, length, quick=options.quick, energy=job.energy))
    return report.finish()


def _race_routed(job: _Job, report: _Report) -> bool:
    options = job.options
    model = job.model()
    decoder = Decoder(model, max_length=job.longest + SPARE_PLACES)
    ids = job.tokens(model, decoder.max_length)
    bench = Bench(
        decoder=decoder,
        ids=ids,
        rates=tuple(options.skipped),
        quick=options.quick,
        trained=bool(options.adapter),
        backend=job.backend,
        energy=job.energy,
        parts=job.parts,
    )
    # At the longest prompt, where the tables choose what the figures stand for.
    prompt = ids[:, : max(options.prompts)]
    gate, *others = [
        check_decoder(model, decoder, prompt, table) for table in dict.fromkeys(map(bench.table, options.skipped))
    ]
    if others:
        gate |= {"other_tables": others, "green": gate["green"] and all(other["green"] for other in others)}
    router = decoder.layers[0].ffn.router
    group_size = decoder.layers[0].ffn.gate.shape[0] // (1 if router is None else router.num_groups)
    if not report.begin(gate, layers=len(decoder.layers), ffn_group_size=group_size, method=job.method):
        return False
    for what, length, batch in job.shapes():
        report.add((prefill_race if what == "prefill" else decode_race)(bench, length, batch))
    if options.compiled_peer:
        # Last, since it takes the routers off.
        detach(model)
        for what, length, batch in job.shapes():
            report.add(compiled_race(bench, model, what, length, batch, "default", report.records))
    return report.finish()


def _race_optimised(job: _Job, report: _Report) -> bool:
    options = job.options
    if options.generate < 2:
        raise ConfigError(
            f"generate() is timed by the tokens beyond the first: generate at least 2, got {options.generate}"
        )
    attention, ffn = options.skipped[0]
    executed = (1 - attention, 1 - ffn)
    masked = job.model()
    optimised = optimize(job.model(), backend=job.backend, executed=executed)
    tokens = job.tokens(masked, max(options.prompts))
    tables = _tables(masked, executed, job.backend)
    if not report.begin(check_optimised(masked, optimised, tokens, tables), method=job.method):
        return False
    models = {"dense": job.model(attached=False), "masked": masked, "optimised": optimised}
    rounds = _QUICK_DOOR_ROUNDS if options.quick else _DOOR_ROUNDS
    for batch in options.batches:
        for length in options.prompts:
            ids = tokens[:, :length].expand(batch, -1).contiguous()
            report.add(door_race(models, ids, options.generate, rounds=rounds))
    return report.finish()


def _tables(model: Any, executed: tuple[float, float], backend: str) -> list[OperatorTable]:
    """Return what `wide.optimize` takes for each layer."""
    state = attachment(model)
    if backend != "auto":
        return [OperatorTable(backend=backend)] * len(state.specs)
    weight = state.specs[0].attention.query.weight
    return [
        measured_table(layer_sizes(spec, layer), device=weight.device, dtype=weight.dtype, executed=executed)  # type: ignore[arg-type]
        for spec, layer in zip(state.specs, state.plan.layers, strict=True)
    ]
