"""First token of a second turn of a chat, and of short prompts.

Usage: python -m benchmarks.second_turn [model] [int8]

Llama-3.1-8B's shapes, random weights, half of the groups skipped; `generate()` of the model as loaded, and, for each
format of weights that is named, of the optimised model and of the dense one in the same engine. Each turn is a new
chat: 64 tokens behind 1,032 that the cache holds. One JSON line each, milliseconds in the order of the calls.
"""

import json
import sys
import time
from typing import Any

import torch

import wide
from wide.models.observe import bypass
from wide.profiling.synthetic import random_model, set_shares

GREEDY = {"do_sample": False, "return_dict_in_generate": True}


def first_token(model: Any, ids: torch.Tensor, cache: Any = None) -> float:
    """Return the milliseconds until the first token."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    given = {} if cache is None else {"past_key_values": cache}
    model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=1, **given, **GREEDY)
    torch.cuda.synchronize()
    return round((time.perf_counter() - start) * 1e3, 2)


def second_turn(model: Any, ids: torch.Tensor) -> float:
    """Return the milliseconds until the first token of a second turn."""
    first = ids[:, :1000]
    out = model.generate(first, attention_mask=torch.ones_like(first), max_new_tokens=33, **GREEDY)
    return first_token(model, torch.cat([out.sequences, ids[:, 2000:2063]], 1), out.past_key_values)


def measure(model: Any, ids: torch.Tensor, who: str) -> None:
    """Print what one model takes."""
    found: dict[str, Any] = {"who": who, "second_turn": [second_turn(model, ids) for _ in range(6)]}
    for length in (128, 512):
        found[f"prompt_{length}"] = [first_token(model, ids[:, :length]) for _ in range(8)]
    print(json.dumps(found), flush=True)


def main() -> None:
    """Measure what the command line names."""
    torch.manual_seed(0)
    model = random_model("llama-3.1-8b", num_layers=None, device=torch.device("cuda"), dtype=torch.bfloat16)
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    ids = torch.randint(0, model.config.vocab_size, (1, 4096), device="cuda")
    measure(model, ids, "as loaded")
    wide.attach(model, wide.WideConfig(ffn_group_size=128, router_rank=32))
    set_shares(model, ids[:, :2048], (0.5, 0.5))
    for weights in sys.argv[1:] or ["model"]:
        wide.optimize(model, weights=weights)
        measure(model, ids, f"routed, {weights}")
        with bypass(model):
            measure(model, ids, f"dense in the engine, {weights}")
        wide.deoptimize(model)


if __name__ == "__main__":
    main()
