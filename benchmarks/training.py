"""Training throughput: stages 1 and 2 against a plain forward and backward through the frozen base.

Usage: python -m benchmarks.training --model M | --shape llama-3.1-8b [--batch_sizes 1,4] [--sequence_length 4096]
       [--stages plain,1,2] [--ways eager,recomputed,compiled,both] [--out FILE]
       python -m benchmarks.training --calculate [--out FILE]   # what models of other sizes need, without a GPU

The plain pass differentiates the LM loss with respect to the embeddings, so that its backward runs through every
layer as the routers' does; no weight of the base gets a gradient in either. Its loss and its ways of running layers
are those of the stages.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from wide.config import ObjectiveConfig, RecoverConfig, StageConfig, WideConfig
from wide.data.batches import TokenBatch
from wide.models.attach import attach, detach
from wide.models.discovery import discover
from wide.models.lora import add_lora
from wide.models.pretrained import choose_device, load_pretrained
from wide.plan import Dense, LayerPlan, Plan
from wide.profiling.synthetic import random_model
from wide.training.memory import needed, step_flops
from wide.training.modes import layers_run, trainable_parameters, training_mode
from wide.training.objective import Objective
from wide.training.token_loss import OutputHead, losses_of, token_losses

Step = Callable[[], None]
_WAYS = {"eager": (False, False), "recomputed": (True, False), "compiled": (False, True), "both": (True, True)}
"""Name of a way -> whether layers are recomputed, whether they are compiled."""


# Hidden size, FFN width, layers, query heads, vocabulary, whether the head is the embedding; 8 KV heads of 128.
_SIZES = {
    "8B": (4096, 14336, 32, 32, 128256, False),
    "32B": (5120, 25600, 64, 64, 151936, False),
    "70B": (8192, 28672, 80, 64, 128256, False),
}
# FLOP/s on an H200 (989e12 dense at most) that the step reached at 8B, by whether it was compiled, with LoRA.
_REACHED = {(False, False): 0.42e15, (True, False): 0.58e15, (False, True): 0.31e15, (True, True): 0.49e15}
# GiB that cards of 40, 80 and 141 GB have.
_CARDS = {40: 39.4, 80: 79.1, 141: 139.8}


@contextmanager
def plain_step(model: Any, batch: TokenBatch, *, recompute: bool, fuse: bool) -> Iterator[Step]:
    """Yield a step that runs forward and backward through the frozen base.

    Args:
        model: Attached to a plan in which everything is dense.
        batch: Without padding.
        recompute: Whether layers are recomputed in the backward.
        fuse: Whether layers and loss are compiled.
    """
    head, table = OutputHead(model), model.get_input_embeddings()
    compute = torch.compile(losses_of, fullgraph=True, dynamic=False) if fuse else losses_of

    def run() -> None:
        embedded = table(batch.input_ids).detach().requires_grad_(True)
        states, apart = head.states(model, inputs_embeds=embedded, use_cache=False)
        (token_losses(states, batch.labels, head=apart, compute=compute)[0] / batch.labels.numel()).backward()

    with layers_run(model, recompute=recompute, fuse=fuse):
        yield run


@contextmanager
def stage_step(model: Any, batch: TokenBatch, *, recompute: bool, fuse: bool) -> Iterator[Step]:
    """Yield a step of the objective with an AdamW update of routers and, where there is one, LoRA.

    Args:
        model: Attached to a plan with routers.
        batch: Without padding.
        recompute: Whether layers are recomputed in the backward.
        fuse: Whether layers and loss are compiled.
    """
    objective = Objective(model, ObjectiveConfig(), fuse=fuse)
    parameters = list(trainable_parameters(model, routers=True).values())
    optimizer = torch.optim.AdamW(parameters, lr=1e-6, fused=parameters[0].is_cuda)

    def run() -> None:
        loss, _ = objective(batch, padded=False)
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    with training_mode(model, routers=True, gradient_checkpointing=recompute, compile=fuse):
        yield run


def measure(step: Step, *, rounds: int, device: torch.device) -> dict[str, float]:
    """Return the seconds of the first step, the median of later ones, and their peak memory in bytes (0 on a CPU)."""
    is_gpu = device.type == "cuda"
    seconds = []
    for number in range(rounds + 2):
        if is_gpu and number == 2:
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        step()
        if is_gpu:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    peak = torch.cuda.max_memory_allocated() if is_gpu else 0
    return {
        "seconds": statistics.median(seconds[2:]),
        "first_step_seconds": seconds[0],
        "peak_memory_bytes": float(peak),
    }


def calculated() -> list[dict[str, Any]]:
    """Return what each size needs for 1 x 4096 tokens a GPU, both stages, by the quickest way that fits.

    A row holds model, stage, gpus, card (GB), way ('compiled', 'recomputed': compiled, too; 'none' where nothing fits),
    sharded, GiB of a GPU, and tokens/s of one H200 at the rates measured at 8B, null where the base is sharded.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    rows = []
    for name, (hidden, width, layers, heads, vocabulary, tied) in _SIZES.items():
        sizes = {"hidden_size": hidden, "intermediate_size": width, "num_hidden_layers": layers}
        sizes |= {"num_attention_heads": heads, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": vocabulary}
        with torch.device("meta"):
            model = LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=tied))
        for stage, kind in (("1", StageConfig), ("2", RecoverConfig)):
            for gpus in (1, 4, 8):
                config = kind(batch_size=gpus, sequence_length=4096, compile=True)
                ways = [(again, shards) for shards in sorted({1, gpus}) for again in (False, True)]
                for card, available in _CARDS.items():
                    row: dict[str, Any] = {
                        "model": name,
                        "stage": stage,
                        "gpus": gpus,
                        "card": card,
                        "way": "none",
                        "sharded": False,
                    }
                    row |= {"gib": None, "tokens_per_second": None}
                    for again, shards in ways:
                        tried = replace(config, gradient_checkpointing=again)
                        need = needed(model, tried, dtype="bfloat16", world=gpus, shards=shards)
                        if need.fits(int(available * 2**30)):
                            row |= {"way": "recomputed" if again else "compiled", "sharded": shards > 1}
                            row["gib"] = round(need.total / 2**30, 1)
                            if shards == 1:
                                reached = _REACHED[tried.compile, stage == "2"]
                                row["tokens_per_second"] = round(4096 * gpus * reached / step_flops(model, tried))
                            break
                    rows.append(row)
    return rows


def _prepare(model: Any, stage: str, options: argparse.Namespace) -> None:
    """Bring the model from the stage before into this one."""
    if stage == "plain":
        attach(model, Plan(tuple(LayerPlan(attention=Dense(), ffn=Dense()) for _ in discover(model))))
    elif stage == "1":
        attach(model, WideConfig(ffn_group_size=options.ffn_group_size))
    else:
        attach(model, WideConfig(ffn_group_size=options.ffn_group_size))
        add_lora(model)


def _measured(model: Any, stage: str, rows: int, way: str, options: argparse.Namespace) -> dict[str, Any]:
    device = next(model.parameters()).device
    ids = torch.randint(3, model.config.vocab_size, (rows, options.sequence_length), device=device)
    batch = TokenBatch(input_ids=ids, labels=ids, valid=torch.ones_like(ids, dtype=torch.bool))
    recompute, fuse = _WAYS[way]
    make = plain_step if stage == "plain" else stage_step
    try:
        with make(model, batch, recompute=recompute, fuse=fuse) as step:
            found: dict[str, Any] = measure(step, rounds=options.rounds, device=device)
    except torch.OutOfMemoryError as error:
        return {"error": str(error).splitlines()[0]}
    return found | {"tokens_per_second": ids.numel() / found["seconds"]}


def main(arguments: list[str] | None = None) -> int:
    """Measure steps on batches of random tokens, print each as it comes, and write all of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="name or folder")
    parser.add_argument("--shape", help="random weights of a known shape, in bfloat16")
    parser.add_argument("--layers", type=int, help="decoder layers of the shape")
    parser.add_argument("--batch_sizes", default="16")
    parser.add_argument("--sequence_length", type=int, default=1024)
    parser.add_argument("--ffn_group_size", type=int, default=128)
    parser.add_argument("--stages", default="plain,1,2")
    parser.add_argument("--ways", default="eager,recomputed,compiled,both")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--calculate", action="store_true", help="calculate what other sizes need, and end")
    options = parser.parse_args(arguments)
    if options.calculate:
        text = json.dumps(calculated(), indent=1)
        print(text)
        if options.out is not None:
            options.out.write_text(f"{text}\n")
        return 0
    if options.shape is not None:
        where = choose_device(None)
        model = random_model(options.shape, num_layers=options.layers, device=where, dtype=torch.bfloat16)
    else:
        model = load_pretrained(options.model, dtype=options.dtype)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    found: dict[str, dict[str, Any]] = {}
    for stage in options.stages.split(","):
        _prepare(model, stage, options)
        for rows in map(int, options.batch_sizes.split(",")):
            for way in options.ways.split(","):
                name = f"{stage if stage == 'plain' else f'stage {stage}'}, {rows} x {options.sequence_length}, {way}"
                values = found[name] = _measured(model, stage, rows, way, options)
                if "error" not in values:
                    print(
                        f"{name:32s} {values['seconds'] * 1e3:8.1f} ms {values['tokens_per_second']:9.0f} tokens/s "
                        f"{values['peak_memory_bytes'] / 2**30:6.2f} GiB, first {values['first_step_seconds']:.1f} s",
                        flush=True,
                    )
                else:
                    print(f"{name:32s} {values['error']}", flush=True)
                if options.out is not None:
                    options.out.write_text(json.dumps(found, indent=1) + "\n")
        detach(model)
    return 0


if __name__ == "__main__":
    sys.exit(main())
