"""End-to-end bench: prefill and decode steps of a whole model, dense against routed, in one process on a GPU.

Usage: python -m wide.profiling.endtoend --shape llama-3.1-8b --out DIR [--prompt 4096,16384] [--decode 2048,16384]
       python -m wide.profiling.endtoend --model DIR [--adapter DIR | --checkpoint DIR] [--text FILE] --out DIR

An adapter whose plan is static, and a checkpoint that wide.materialise left, are raced as Hugging Face runs them.
Otherwise a correctness gate comes first. Then every shape races the dense runtime against the routed one under random
masks at each rate, where routers run although their decisions are replaced; at rate 0 everything executes. Times are
medians of CUDA-graph replays, candidates interleaved.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

from wide.config import WideConfig
from wide.errors import ConfigError
from wide.inference.decoder import Decoder
from wide.profiling.agreement_endtoend import check
from wide.profiling.endtoend_races import Bench, compiled_race, decode_race, one_sort, operator_table, prefill_race
from wide.profiling.energy import EnergyCounter, energy_counter
from wide.profiling.materialised import Pair, is_static, load_pair, materialise_pair, method_of, pair_race
from wide.profiling.metrics import summarise, summary_table
from wide.profiling.synthetic import random_model
from wide.profiling.table_choice import all_sparse, with_special_kernels

_SPARE_PLACES = 64
_DEVICE = "cuda"
_GATE_TOKENS = 640


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def _numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",") if word]


def _rates(text: str) -> tuple[float, float]:
    attention, ffn = (float(word) for word in text.split(","))
    return attention, ffn


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama-3.1-8b", help="a model with random weights")
    parser.add_argument("--layers", type=int, help="fewer layers than the shape has")
    parser.add_argument("--model", help="a real model instead: folder or name")
    pruned = parser.add_mutually_exclusive_group()
    pruned.add_argument("--adapter", help="its routers; without it they are random")
    pruned.add_argument("--checkpoint", help="what wide.materialise left of the real model, raced beside it")
    parser.add_argument("--text", type=Path, help="prompt of a real model; without it tokens are random")
    parser.add_argument("--out", type=Path, required=True, help="folder for endtoend.json")
    parser.add_argument(
        "--prompt", type=_numbers, default=[4096, 16384], help="prompt lengths of prefills; '' times none"
    )
    parser.add_argument(
        "--decode", type=_numbers, default=[2048, 16384], help="tokens cached before a decode step; '' times none"
    )
    parser.add_argument("--batch", type=_numbers, default=[1], help="sequences")
    parser.add_argument("--generate", type=int, help="tokens to generate after each prompt; replaces --decode")
    parser.add_argument("--energy", action="store_true", help="measure joules, too (where NVML counts them)")
    parser.add_argument("--ffn-group-size", type=int, default=128)
    parser.add_argument("--attention-group-size", type=int)
    parser.add_argument("--rates", type=_rates, nargs="+", default=[(0.5, 0.5)], help="skipped attention,FFN")
    parser.add_argument("--compiled-peer", choices=("default", "max-autotune-no-cudagraphs"), help="race it too")
    parser.add_argument(
        "--optimised", action="store_true", help="race the Hugging Face model itself: dense, masked, wide.optimize"
    )
    parser.add_argument("--quick", action="store_true", help="fewer samples; operators as measured one by one")
    parser.add_argument("--no-breakdown", action="store_true", help="leave out where the time of a forward goes")
    parser.add_argument("--despite-red", action="store_true", help="time even what failed the gate")
    return parser


def _model(options: argparse.Namespace, device: torch.device) -> Any:
    """Return the attached model."""
    from wide.models.attach import attach, is_attached
    from wide.models.attach import attachment as attachment_of

    if options.model is None:
        model = random_model(options.shape, num_layers=options.layers, device=device, dtype=torch.bfloat16)
    else:
        from wide.models.adapter import load
        from wide.models.pretrained import load_pretrained

        model = load_pretrained(options.model, dtype="bfloat16", device=str(device))
        if options.adapter is not None:
            model = load(model, options.adapter)
            if attachment_of(model).lora is not None:
                from wide.models.lora import merge_lora

                merge_lora(model)
            model.eval()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    if not is_attached(model):
        config = WideConfig(ffn_group_size=options.ffn_group_size, attention_group_size=options.attention_group_size)
        attach(model, config)
    return model


def _tokens(options: argparse.Namespace, model: Any, count: int, device: torch.device) -> torch.Tensor:
    """Return [1, count] prompt tokens: of the text, repeated as needed, or random ones."""
    if options.text is not None and options.model is not None:
        from transformers import AutoTokenizer

        found = AutoTokenizer.from_pretrained(options.model)(options.text.read_text())["input_ids"]
        ids = torch.tensor(found, device=device)
        return ids.repeat(-(-count // ids.numel()))[None, :count]
    return torch.randint(0, model.config.vocab_size, (1, count), device=device)


def _gate(model: Any, decoder: Decoder, ids: torch.Tensor, rates: tuple[float, float]) -> dict[str, Any]:
    """Return the verdict on the general kernels and, where the measured table takes others, on those too."""
    sparse = all_sparse("triton")
    gate = check(model, decoder, sparse, ids)
    _say(f"gate: {json.dumps(gate)}")
    special = with_special_kernels(sparse, operator_table(decoder, rates))
    down = one_sort(decoder)
    if down is not None:
        special = special.with_many("down", down)
    if special != sparse:
        other = check(model, decoder, special, ids)
        _say(f"gate, kernels of this GPU: {json.dumps(other)}")
        gate |= {"special_kernels": other, "green": gate["green"] and other["green"]}
    return gate


def _table(records: list[dict[str, Any]]) -> str:
    lines = ["what      B  tokens  candidate                 median us  [p10-p90]            speed-up  ceiling"]
    for r in records:
        if "failure" in r:
            lines.append(
                f"{r['what']:8s} {r['batch']:2d} {r['tokens']:7d}  {r['candidate']:24s} FAIL {r['failure'][:90]}"
            )
            continue
        lines.append(
            f"{r['what']:8s} {r['batch']:2d} {r['tokens']:7d}  {r['candidate']:24s} {r['median_us']:10.1f}  "
            f"[{r['low_us']:.1f}-{r['high_us']:.1f}]  x{r['speedup']:.3f}  {r.get('ceiling', 1.0):.2f}"
        )
    return "\n".join(lines)


def _details(record: dict[str, Any]) -> str:
    parts = ", ".join(f"{name} {value:.0f}" for name, value in record.get("breakdown_us", {}).items())
    return f"  {record['what']} {record['tokens']} {record['candidate']}: {parts}"


def _summary(records: list[dict[str, Any]], options: argparse.Namespace) -> list[dict[str, Any]]:
    return [
        entry
        for length in options.prompt
        for batch in options.batch
        for entry in summarise(records, prompt=length, generate=options.generate, batch=batch)
    ]


def _name(options: argparse.Namespace) -> str:
    # A shape cut to fewer layers is another model: its figures must not stand for the whole one's.
    cut = "" if options.layers is None or options.model is not None else f", {options.layers} layers"
    return f"{options.model or options.shape}{cut}"


class _Report:
    """What endtoend.json holds, written after every shape so that a stopped run keeps what it measured."""

    def __init__(self, options: argparse.Namespace, **facts: Any) -> None:
        self.records: list[dict[str, Any]] = []
        self._began = time.perf_counter()
        self._file = options.out / "endtoend.json"
        self.content: dict[str, Any] = {
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
            "torch": torch.__version__,
            "model": _name(options),
            "quick": options.quick,
            "adapter": options.adapter,
            "checkpoint": options.checkpoint,
            **facts,
            "records": self.records,
        }
        self.write()

    def write(self) -> None:
        self._file.write_text(json.dumps(self.content, indent=1) + "\n")

    def add(self, found: list[dict[str, Any]]) -> None:
        self.records += found
        self.write()
        _say(_table(found))
        details = [_details(record) for record in found if "breakdown_us" in record]
        _say("\n".join([*details, f"({time.perf_counter() - self._began:.0f} s)"]))
        torch.cuda.empty_cache()

    def finish(self, options: argparse.Namespace) -> None:
        _say(_table(self.records))
        if options.generate is not None:
            self.content["summary"] = _summary(self.records, options)
            self.write()
            _say(summary_table(self.content["summary"]))


def _shapes(options: argparse.Namespace) -> list[tuple[str, int, int]]:
    lengths = [("prefill", n) for n in options.prompt] + [("decode", n) for n in options.decode]
    return [(what, length, batch) for what, length in lengths for batch in options.batch]


def main(arguments: list[str] | None = None) -> int:
    """Run the bench; return 1 if the runtime disagrees with the model.

    Raises:
        ConfigError: If a compiled peer or an optimised model is asked for beside a static plan, or a checkpoint is of
            another model.
    """
    options = _parser().parse_args(arguments)
    static = options.checkpoint is not None or (options.adapter is not None and is_static(Path(options.adapter)))
    if static and options.compiled_peer:
        raise ConfigError(
            "the compiled peer is raced beside routed models only, and this plan is static: both models already run as "
            "Hugging Face has them; leave the compiled peer out"
        )
    if options.optimised and (static or options.compiled_peer):
        raise ConfigError(
            "--optimised races a routed model as Hugging Face runs it: leave out --compiled-peer, and name an adapter "
            "with routers or none"
        )
    if options.generate is not None:
        options.decode = [length + options.generate // 2 for length in options.prompt]
    options.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(17)
    energy = energy_counter() if options.energy else None
    if options.energy and energy is None:
        _say("energy is not measured: NVML has no energy counter for this GPU")
    if static:
        return _race_materialised(options, energy)
    return (_race_optimised if options.optimised else _race_routed)(options, energy)


def _race_materialised(options: argparse.Namespace, energy: EnergyCounter | None) -> int:
    device = torch.device(_DEVICE)
    pair: Pair
    if options.checkpoint is not None:
        # A checkpoint does not say what made it.
        method = ""
        pair = load_pair(options.model, options.checkpoint, dtype="bfloat16", device=device)
    else:
        adapter = Path(options.adapter)
        method = method_of(adapter)
        ids = torch.randint(0, _vocabulary(options.model), (1, _GATE_TOKENS), device=device)
        pair = materialise_pair(options.model, adapter, ids, dtype="bfloat16", device=device)
    gate = pair.gate()
    _say(f"gate: {json.dumps(gate)}")
    report = _Report(options, method=method, gate=gate)
    if not gate["green"] and not options.despite_red:
        _say("RED: the smaller model does not compute what its plan says; nothing is timed")
        return 1
    longest = max([*options.prompt, 1])
    tokens = _tokens(options, pair.dense, longest, device)
    for what, length, batch in _shapes(options):
        ids = tokens[:, : length if what == "prefill" else 1].expand(batch, -1).contiguous()
        report.add(pair_race(pair, what, ids, length, quick=options.quick, energy=energy))
    report.finish(options)
    return 0 if gate["green"] else 1


def _vocabulary(model: str) -> int:
    from transformers import AutoConfig

    return int(AutoConfig.from_pretrained(model).vocab_size)


def _race_routed(options: argparse.Namespace, energy: EnergyCounter | None) -> int:
    began = time.perf_counter()
    device = torch.device(_DEVICE)
    model = _model(options, device)
    max_length = max([_GATE_TOKENS, *options.prompt, *(n + _SPARE_PLACES for n in options.decode)])
    decoder = Decoder(model, max_length=max_length)
    ids = _tokens(options, model, max_length, device)
    _say(f"model ready after {time.perf_counter() - began:.0f} s")
    gate = _gate(model, decoder, ids[:, :_GATE_TOKENS], options.rates[0])
    group_size = decoder.layers[0].ffn.gate.shape[0] // _groups(decoder)
    method = "wide" if options.adapter is None else method_of(Path(options.adapter))
    report = _Report(options, layers=len(decoder.layers), ffn_group_size=group_size, method=method, gate=gate)
    if not gate["green"] and not options.despite_red:
        _say("RED: the runtime does not compute what the model computes; nothing is timed")
        return 1
    bench = Bench(
        decoder=decoder,
        ids=ids,
        rates=tuple(options.rates),
        quick=options.quick,
        trained=bool(options.adapter),
        energy=energy,
        parts=not options.no_breakdown,
    )
    for what, length, batch in _shapes(options):
        report.add((prefill_race if what == "prefill" else decode_race)(bench, length, batch))
    if options.compiled_peer:
        from wide.models.attach import detach

        # Last, since it takes the routers off.
        detach(model)
        for what, length, batch in _shapes(options):
            report.add(compiled_race(bench, model, what, length, batch, options.compiled_peer, report.records))
    report.finish(options)
    return 0 if gate["green"] else 1


def _race_optimised(options: argparse.Namespace, energy: EnergyCounter | None) -> int:
    from wide.profiling.optimised import optimised_forms, optimised_gate, optimised_race

    device = torch.device(_DEVICE)

    def make() -> Any:
        torch.manual_seed(17)
        return _model(options, device)

    attention, ffn = options.rates[0]
    forms = optimised_forms(make, backend="auto", executed=(1 - attention, 1 - ffn))
    tokens = _tokens(options, forms.masked, max([_GATE_TOKENS, *options.prompt]), device)
    gate = optimised_gate(forms, tokens[:, :_GATE_TOKENS])
    _say(f"gate: {json.dumps(gate)}")
    method = "wide" if options.adapter is None else method_of(Path(options.adapter))
    report = _Report(options, method=method, gate=gate)
    if not gate["green"] and not options.despite_red:
        _say("RED: the optimised model does not compute what the masked one computes; nothing is timed")
        return 1
    for what, length, batch in _shapes(options):
        ids = tokens[:, : length if what == "prefill" else 1].expand(batch, -1).contiguous()
        report.add(optimised_race(forms, what, ids, length, quick=options.quick, energy=energy))
    report.finish(options)
    return 0 if gate["green"] else 1


def _groups(decoder: Decoder) -> int:
    router = decoder.layers[0].ffn.router
    return 1 if router is None else router.num_groups


if __name__ == "__main__":
    sys.exit(main())
