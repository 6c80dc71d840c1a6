"""Training throughput: stages 1 and 2 against a plain forward and backward through the frozen base.

Usage: python -m benchmarks.training --model M [--batch_size 16] [--sequence_length 1024] [--compile] [--out FILE]

The plain pass differentiates the LM loss with respect to the embeddings, so that its backward runs through every
layer as the routers' does; no weight of the base gets a gradient in either.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from wide.config import ObjectiveConfig, WideConfig
from wide.data.batches import TokenBatch
from wide.models.attach import attach, attachment
from wide.models.lora import add_lora
from wide.models.pretrained import load_pretrained
from wide.training.objective import Objective

Step = Callable[[], None]


def plain_step(model: Any, batch: TokenBatch) -> Step:
    """Return a step that runs forward and backward through the frozen base with a float32 cross-entropy."""

    def run() -> None:
        embedded = model.get_input_embeddings()(batch.input_ids).detach().requires_grad_(True)
        logits = model(inputs_embeds=embedded, use_cache=False).logits[:, :-1]
        functional.cross_entropy(logits.flatten(0, 1).float(), batch.labels[:, 1:].flatten()).backward()

    return run


def stage_step(model: Any, batch: TokenBatch, *, compiled: ExitStack | None = None) -> Step:
    """Return a step of the objective with an AdamW update of whatever is trainable.

    Args:
        model: Attached, in training mode.
        batch: Without padding.
        compiled: Lets `torch.compile` fuse the step for as long as this is open; None leaves it as it is.
    """
    objective = Objective(model, ObjectiveConfig())
    if compiled is not None:
        compiled.enter_context(objective.compiled())
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1e-6, fused=parameters[0].is_cuda)

    def run() -> None:
        loss, _ = objective(batch, padded=False)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return run


def measure(step: Step, *, rounds: int, device: torch.device) -> dict[str, float]:
    """Return the median seconds of a step and its peak memory in bytes (0 on the CPU)."""
    for _ in range(2):
        step()
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    seconds = []
    for _ in range(rounds):
        start = time.perf_counter()
        step()
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
    return {"seconds": statistics.median(seconds), "peak_memory_bytes": float(peak)}


def _measure_stage(
    found: dict[str, dict[str, float]], name: str, model: Any, batch: TokenBatch, options: argparse.Namespace
) -> None:
    device = batch.input_ids.device
    found[name] = measure(stage_step(model, batch), rounds=options.rounds, device=device)
    if not options.compile:
        return
    with ExitStack() as compiled:
        step = stage_step(model, batch, compiled=compiled)
        start = time.perf_counter()
        step()
        first = time.perf_counter() - start
        found[f"{name}, compiled"] = measure(step, rounds=options.rounds, device=device) | {"first_step_seconds": first}


def main(arguments: list[str] | None = None) -> int:
    """Measure the three steps on one batch of random tokens and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--batch_size", type=int, default=16)
    parser.add_argument("--sequence_length", type=int, default=1024)
    parser.add_argument("--ffn_group_size", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--compile", action="store_true", help="measure both stages compiled, too")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    model = load_pretrained(options.model, dtype=options.dtype)
    device = next(model.parameters()).device
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    ids = torch.randint(3, model.config.vocab_size, (options.batch_size, options.sequence_length), device=device)
    batch = TokenBatch(input_ids=ids, labels=ids, valid=torch.ones_like(ids, dtype=torch.bool))
    tokens = ids.numel()
    found = {"plain": measure(plain_step(model, batch), rounds=options.rounds, device=device)}
    attach(model, WideConfig(ffn_group_size=options.ffn_group_size))
    model.train()
    _measure_stage(found, "stage 1", model, batch, options)
    add_lora(model)
    for router in attachment(model).routers():
        router.requires_grad_(True)
    model.train()
    _measure_stage(found, "stage 1+2", model, batch, options)
    for name, values in found.items():
        values["tokens_per_second"] = tokens / values["seconds"]
        values["ratio_to_plain"] = found["plain"]["seconds"] / values["seconds"]
        print(
            f"{name:20s} {values['seconds'] * 1e3:8.1f} ms  {values['tokens_per_second']:10.0f} tokens/s  "
            f"{values['peak_memory_bytes'] / 2**30:6.2f} GiB  ratio {values['ratio_to_plain']:.3f}"
        )
    if options.out is not None:
        options.out.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
