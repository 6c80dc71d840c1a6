"""Whole prefills with the down product over one sort. PYTHONPATH=src, one H200.

forward_trained.py OUT masks MASKS.npz 16384 4096: the runtime, 32 layers of Llama-3.1-8B's shape with 96 FFN groups of
128 channels, under masks of trained routers (nano's, as in trained.py; its six masks in turn, rows rolled from layer to
layer) and independent attention masks of 50 %: dense, down dense, down over one sort.
forward_trained.py OUT sample 16384 4096: `wide.optimize` without and with a sample, on 8 layers whose FFN routers are
random and cut to ranks of 2 to 16, so that rows are more or less alike.
"""

import dataclasses
import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import torch

import wide
from wide.config import WideConfig
from wide.models.attach import attach, attachment
from wide.models.observe import bypass
from wide.models.sample import sample_layers
from wide.profiling import synthetic
from wide.profiling.captured import captured_call
from wide.profiling.endtoend_races import one_sort, operator_table
from wide.profiling.timing import time_interleaved
from wide.runtime.decoder import Decoder
from wide.runtime.run import Run, force

SIZE, LAYERS, RANKS = 128, 32, (2, 2, 4, 4, 8, 8, 16, 16)
DEVICE = torch.device("cuda")
OUT, WHAT = Path(sys.argv[1]), sys.argv[2]
began = time.time()
records: list[dict] = []


def say(*words: object) -> None:
    print(f"{time.time() - began:6.1f}", *words, flush=True)


def keep(times: dict, **facts: object) -> None:
    for name, timing in times.items():
        speedup = times["dense"].median_us / timing.median_us
        records.append({**facts, "candidate": name, **dataclasses.asdict(timing), "speedup": speedup})
        say(facts["tokens"], f"{name}: {timing.median_us / 1000:.2f} ms [{timing.low_us:.0f}-{timing.high_us:.0f}] x{speedup:.3f}")
    found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    head = {
        "what": __doc__, "device": torch.cuda.get_device_name(), "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d"), "commit": found.stdout.strip(), "command": " ".join(sys.argv),
    }  # fmt: skip
    (OUT / f"down-one-sort-{WHAT}.json").write_text(json.dumps({**head, "records": records}, indent=1) + "\n")


def model_of(layers: int, channels: int) -> torch.nn.Module:
    synthetic.SHAPES["here"] = synthetic.SHAPES["llama-3.1-8b"] | {"intermediate_size": channels}
    torch.manual_seed(17)
    model = synthetic.random_model("here", num_layers=layers, device=DEVICE, dtype=torch.bfloat16)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    return attach(model, WideConfig(ffn_group_size=SIZE, attention_group_size=None)).eval()


def difference(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return ((got.float() - wanted.float()).norm() / wanted.float().norm()).item()


def under_masks(path: Path, lengths: list[int]) -> None:
    with np.load(path) as packed:
        trained = [torch.from_numpy(np.unpackbits(packed[name], axis=1).astype(bool)).to(DEVICE) for name in packed.files]
    model = model_of(LAYERS, SIZE * trained[0].shape[1])
    decoder = Decoder(model, max_length=max(lengths) + 64, checked=False)
    for length in lengths:
        ffn = [trained[i % len(trained)][:length].roll(977 * i, 0) for i in range(LAYERS)]
        share = torch.stack([mask.float().mean() for mask in ffn]).mean().item()
        independent = synthetic.random_masks(decoder.layers, length, (0.5, 0.5))
        own = force(decoder.layers, [(None, mask) for mask in ffn])
        masks = [(attention, mask) for (attention, _), (_, mask) in zip(independent, own, strict=True)]
        ids = torch.randint(0, model.config.vocab_size, (1, length), device=DEVICE)
        places, cache = torch.full((1,), length, dtype=torch.int32, device=DEVICE), decoder.new_cache(1, length)
        table = operator_table(decoder, (0.5, 1 - share))
        sort = one_sort(decoder)
        assert sort is not None
        runs = {
            "dense": Run(routed=False, table=table),
            "down dense": Run(table=table.without("down", few=False), forced=masks),
            "down over one sort": Run(table=table.with_many("down", sort), forced=masks),
        }
        calls = {name: lambda run=run: decoder.prefill(ids, places, cache, run) for name, run in runs.items()}
        error = difference(calls["down over one sort"](), calls["down dense"]())
        say(length, f"FFN executes {share:.3f}; against down dense under the same masks: {error:.1e}")
        assert error < 7e-2, error
        keep(time_interleaved(calls, rounds=8), tokens=length, ffn_executed=share, error=error)


def by_sample(lengths: list[int]) -> None:
    def routed() -> torch.nn.Module:
        model = model_of(len(RANKS), 14336)
        for router in attachment(model).routers():
            if router.half_layer == "ffn":
                router.down[RANKS[router.layer_index] :] = 0.0
        return model

    ids = torch.randint(0, 128256, (1, max(lengths)), device=DEVICE)
    masked, plain, sampled = routed(), wide.optimize(routed()), routed()
    layers = sample_layers(sampled, ids[:, :4096])
    wide.optimize(sampled, sample=ids[:, :4096])
    ways = {}
    for length in lengths:
        ways[length] = [
            handle.table.choice("down", length).backend
            for handle in (layer.mlp.forward.__self__ for layer in sampled.model.layers)
        ]
    say("executed and left to tiles:", [(f"{layer.executed[1]:.2f}", f"{layer.left:.2f}") for layer in layers], ways)
    for length in lengths:
        wanted = masked(ids[:, :640]).logits
        errors = {name: difference(model(ids[:, :640]).logits, wanted) for name, model in (("plain", plain), ("sampled", sampled))}
        prompt = ids[:, :length].contiguous()
        dense_call = captured_call(masked, "prefill", prompt, length)

        def dense() -> torch.Tensor:
            with bypass(masked):
                return dense_call()

        calls = {
            "dense": dense,
            "optimised": captured_call(plain, "prefill", prompt, length),
            "optimised, with a sample": captured_call(sampled, "prefill", prompt, length),
        }
        far = difference(calls["optimised, with a sample"](), calls["optimised"]())
        say(length, "against the masked model:", errors, "against each other:", far)
        facts = {"layers": [layer._asdict() for layer in layers], "down": ways[length], "errors": errors, "apart": far}
        keep(time_interleaved(calls, rounds=8), tokens=length, **facts)


if __name__ == "__main__":
    OUT.mkdir(parents=True, exist_ok=True)
    with torch.no_grad():
        if WHAT == "masks":
            under_masks(Path(sys.argv[3]), [int(word) for word in sys.argv[4:]])
        else:
            by_sample([int(word) for word in sys.argv[3:]])
