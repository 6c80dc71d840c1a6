"""Where the time of a prompt and of a step goes, dense and routed in the same engine, by kind of kernel.

Usage: python -m benchmarks.breakdown [PROMPT ...]

Llama-3.1-8B's shapes, random weights, half of the groups skipped; a call of the model, and a token of `generate()`. One
JSON line each: milliseconds of GPU time by part, `waits` (GPU idle between kernels), and `total`.
"""

import json
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

import wide
from wide.models.observe import bypass
from wide.profiling.synthetic import random_model, set_shares

_CALLS, _TOKENS = 3, 33
PARTS = {
    "products that skip": ("gemm_mn", "gemm_k", "_gemv_", "gemv_kernel", "_gated_", "_drain_", "_clear_skipped"),
    "attention": ("attention", "attend_", "_attend", "_merge_parts", "merge_kernel", "flash", "fmha", "sdpa"),
    "router": ("_route",),
    "lists of what executes": (
        *("_transpose_kernel", "_place_", "_histogram_", "_sort_", "_tiles_", "_one_list_", "_unions_", "_items_"),
        "rows_",
    ),
    "dense products": ("nvjet", "gemm", "cutlass", "gemv", "splitK"),
}
"""Part -> what names of its kernels contain; the first that fits counts. Anything else is 'elementwise'."""


def by_part(kernels: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Return the time of each part; `kernels` are names and times."""
    sums = dict.fromkeys([*PARTS, "elementwise"], 0.0)
    for name, spent in kernels:
        part = next((part for part, words in PARTS.items() if any(word in name for word in words)), "elementwise")
        sums[part] += spent
    return sums


def measure(call: Callable[[], object], *, units: int) -> dict[str, float]:
    """Return milliseconds by part of one of the `units` that a call runs."""
    for _ in range(_CALLS):
        call()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(_CALLS):
        call()
    torch.cuda.synchronize()
    total = 1e3 * (time.perf_counter() - began) / _CALLS
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        call()
        torch.cuda.synchronize()
    kernels = [(e.name, 1e-3 * e.device_time) for e in profiler.events() if e.device_type.name == "CUDA"]
    found = by_part(kernels)
    found |= {"waits": max(0.0, total - sum(found.values())), "total": total}
    return {part: round(value / units, 4) for part, value in found.items()}


def main() -> None:
    """Measure what the command line names."""
    torch.manual_seed(0)
    prompts = [int(word) for word in sys.argv[1:]] or [16384]
    model = random_model("llama-3.1-8b", num_layers=None, device=torch.device("cuda"), dtype=torch.bfloat16)
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    ids = torch.randint(0, model.config.vocab_size, (1, max(prompts)), device="cuda")
    wide.attach(model, wide.WideConfig(ffn_group_size=128, router_rank=32))
    set_shares(model, ids[:, :2048], (0.5, 0.5))
    wide.optimize(model)

    def tokens(prompt: torch.Tensor, count: int) -> Any:
        ones = torch.ones_like(prompt)
        return model.generate(prompt, attention_mask=ones, max_new_tokens=count, do_sample=False)

    for length in prompts:
        prompt = ids[:, :length]
        for who in ("dense", "routed"):
            with bypass(model) if who == "dense" else torch.no_grad(), torch.no_grad():
                whole = measure(lambda prompt=prompt: model(prompt, logits_to_keep=1), units=1)  # type: ignore[misc]
                print(json.dumps({"who": who, "prompt": length, "what": "prompt"} | whole), flush=True)
                first = measure(lambda prompt=prompt: tokens(prompt, 1), units=1)  # type: ignore[misc]
                more = measure(lambda prompt=prompt: tokens(prompt, _TOKENS), units=1)  # type: ignore[misc]
                step = {part: round((more[part] - first[part]) / (_TOKENS - 1), 4) for part in more}
                print(json.dumps({"who": who, "prompt": length, "what": "token"} | step), flush=True)


if __name__ == "__main__":
    main()
