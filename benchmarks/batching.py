"""Continuous batching of an optimised model beside the dense one, through `generate_batch`'s engine, graphs on.

Usage: python -m benchmarks.batching --out DIR [--requests 1,8,32,64] [--plain 1,8] [--prompt 1024] [--new 256]
       [--layers 32] [--rounds 1] [--tiny]

Llama-3.1-8B's shapes with random weights; thresholds at the medians of the routers' margins, so that half of the pairs
execute. 'plain' is the model as loaded, with transformers' own attention; 'dense' is the optimised one with its routers
off, over wide's attention: what skipping alone is worth. Times are of whole batches, and of a decoding step: the
difference of a long and a short one. The gate compares tokens with those that the masked model prefers after the same
beginnings; `generate` stands beside it. `--tiny` runs a tiny model, on a CPU, too.
"""

import argparse
import json
import statistics
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM
from transformers.generation.configuration_utils import ContinuousBatchingConfig

import wide
from wide.models.attach import attachment
from wide.models.observe import bypass, capture_routing

_LLAMA = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 32768,
}
_TINY = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 512,
    "max_position_embeddings": 4096,
}
_TOKENS_A_STEP = 4096
_PAGE = 256
# What a batch's tokens may agree worse with the masked model than those of `generate`.
_TOLERANCE = 0.1


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def _ids(batch: int, length: int, vocabulary: int, seed: int) -> Tensor:
    return torch.randint(3, vocabulary, (batch, length), generator=torch.Generator().manual_seed(seed))


def make_model(sizes: dict[str, int], layers: int, device: str) -> Any:
    """Return a random model in evaluation mode, bfloat16 on a GPU."""
    config = LlamaConfig(**sizes, num_hidden_layers=layers, tie_word_embeddings=False, eos_token_id=1, pad_token_id=2)  # type: ignore[arg-type]
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16 if device == "cuda" else torch.float32)
    try:
        with torch.device(device):
            return LlamaForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(torch.float32)


def set_thresholds(model: Any, prompt: int) -> tuple[float, float]:
    """Put every threshold at the median margin; return the executed shares of attention and FFN."""
    vocabulary = model.config.vocab_size
    with torch.no_grad(), capture_routing(model) as routing:
        model(_ids(1, prompt, vocabulary, 5).to(model.device), use_cache=False)
    margins: list[Any] = [margin for layer in routing for margin in (layer.attention_margin, layer.ffn_margin)]
    for router, margin in zip(attachment(model).routers(), margins, strict=True):
        router.threshold = float(margin.flatten().float().median())
    with torch.no_grad(), capture_routing(model) as routing:
        model(_ids(1, prompt, vocabulary, 6).to(model.device), use_cache=False)
    masks: list[Any] = [mask for layer in routing for mask in (layer.attention, layer.ffn)]
    shares = [float(mask.float().mean()) for mask in masks]
    return statistics.mean(shares[::2]), statistics.mean(shares[1::2])


def _greedy(new: int) -> GenerationConfig:
    return GenerationConfig(max_new_tokens=new, do_sample=False, eos_token_id=-1, pad_token_id=2)


@contextmanager
def _running(model: Any, requests: int, prompt: int, new: int) -> Iterator[Any]:
    """Yield a manager that has captured its graphs."""
    pages = requests * (-(-(prompt + new) // _PAGE) + 1)
    step = min(_TOKENS_A_STEP, requests * prompt)
    settings = ContinuousBatchingConfig(
        max_batch_tokens=step,
        num_blocks=max(pages, 2 * step // _PAGE),
        max_requests_per_batch=requests,
        # What one batch leaves in the cache must not help the next.
        allow_block_sharing=False,
        use_cuda_graph=torch.cuda.is_available(),
        q_padding_interval_size=min(64, requests),
    )
    with model.continuous_batching_context_manager(
        generation_config=_greedy(new), continuous_batching_config=settings
    ) as manager:
        yield manager


def _batch(manager: Any, prompts: Sequence[list[int]], new: int) -> tuple[float, dict[str, list[int]]]:
    """Return the seconds that a batch takes, and its tokens."""
    begin = time.perf_counter()
    names = manager.add_requests(inputs=[list(prompt) for prompt in prompts], max_new_tokens=new)
    found: dict[str, list[int]] = {}
    while len(found) < len(names):
        output = manager.get_result(timeout=60)
        if output is None or output.error is not None:
            raise RuntimeError(f"a batch has failed: {'no answer' if output is None else output.error}")
        if output.is_finished():
            found[output.request_id] = list(output.generated_tokens)
    return time.perf_counter() - begin, {name: found[name] for name in names}


def measure(model: Any, requests: int, prompt: int, new: int, rounds: int) -> dict[str, float]:
    """Return tokens/s of whole batches, milliseconds of a decoding step and seconds until all have begun."""
    # As many tokens as there are steps with prompts in them, so that short and long batches take the same such steps.
    short = min(new - 1, -(-requests * prompt // _TOKENS_A_STEP) + 8)
    vocabulary, times = model.config.vocab_size, dict[int, list[float]]()
    with _running(model, requests, prompt, new) as manager:
        for turn in range(rounds + 1):
            for count in (short, new) if turn else (short,):
                prompts = _ids(requests, prompt, vocabulary, 100 * turn + count).tolist()
                seconds = _batch(manager, prompts, count)[0]
                if turn:
                    times.setdefault(count, []).append(seconds)
    begun, whole = (statistics.median(times[count]) for count in (short, new))
    step = (whole - begun) / (new - short)
    return {"tokens_per_s": requests * new / whole, "step_ms": step * 1e3, "begin_s": begun - short * step}


def gate(model: Any, prompt: int, new: int) -> dict[str, float]:
    """Return how often the masked model prefers the tokens of a batch, and those of `generate`, after what came before.

    Args:
        model: Optimised; it is again afterwards.
        prompt: Tokens of each of four ragged prompts, at most.
        new: Tokens to compare.
    """
    vocabulary = model.config.vocab_size
    prompts = [_ids(1, prompt - 37 * row, vocabulary, 50 + row)[0].tolist() for row in range(4)]
    with _running(model, 4, prompt, new) as manager:
        batched = list(_batch(manager, prompts, new)[1].values())
    alone = []
    for ids in prompts:
        given = torch.tensor([ids], device=model.device)
        out = model.generate(given, attention_mask=torch.ones_like(given), generation_config=_greedy(new))
        alone.append(out[0, len(ids) :].tolist())
    wide.deoptimize(model)
    found = {}
    for name, answers in (("batch", batched), ("generate", alone)):
        agreeing = 0.0
        for ids, answer in zip(prompts, answers, strict=True):
            given = torch.tensor([ids + answer], device=model.device)
            with torch.no_grad():
                preferred = model(given, use_cache=False).logits[0, len(ids) - 1 : -1].argmax(-1)
            agreeing += float((preferred == given[0, len(ids) :]).float().mean()) / len(prompts)
        found[name] = agreeing
    _optimize(model)
    return found


def _optimize(model: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wide.optimize(model, backend="auto" if torch.cuda.is_available() else "torch")


def run(options: argparse.Namespace) -> bool:
    """Measure all forms, write batching.json and return whether the gate is green."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = make_model(_TINY if options.tiny else _LLAMA, options.layers, device)
    shape = (options.prompt, options.new, options.rounds)
    records: list[dict[str, Any]] = []

    def record(form: str, requests: int, within: AbstractContextManager[Any]) -> None:
        with within:
            found = measure(model, requests, *shape)
        records.append({"form": form, "requests": requests, **found})
        figures = (
            f"{found['tokens_per_s']:10.1f} tokens/s  {found['step_ms']:8.3f} ms a step  {found['begin_s']:7.3f} s"
        )
        _say(f"{requests:4d} requests  {form:7s} {figures}")

    for requests in options.plain:
        record("plain", requests, nullcontext())
    wide.attach(model, wide.WideConfig(ffn_group_size=32 if options.tiny else 128))
    shares = set_thresholds(model, options.prompt)
    _say(f"executed: attention {shares[0]:.3f}, FFN {shares[1]:.3f}")
    _optimize(model)
    agreement = gate(model, options.prompt, min(32, options.new))
    is_green = agreement["batch"] >= agreement["generate"] - _TOLERANCE
    _say(f"gate {'green' if is_green else 'RED'}: the masked model prefers {agreement}")
    for requests in options.requests if is_green else ():
        record("dense", requests, bypass(model))
        record("routed", requests, nullcontext())
    rates = {(each["form"], each["requests"]): each["tokens_per_s"] for each in records}
    for requests in options.requests if is_green else ():
        ratios = {
            form: rates["routed", requests] / rates[form, requests]
            for form in ("dense", "plain")
            if (form, requests) in rates
        }
        _say(
            f"{requests:4d} requests  routed is " + ", ".join(f"{ratio:.2f}x {form}" for form, ratio in ratios.items())
        )
    name = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    report = {"device": name, "options": {**vars(options), "out": str(options.out)}, "executed": shares}
    options.out.mkdir(parents=True, exist_ok=True)
    text = json.dumps({**report, "agreement": agreement, "records": records}, indent=1)
    (options.out / "batching.json").write_text(text + "\n")
    return is_green


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part]


def main(arguments: list[str] | None = None) -> int:
    """Run the bench; return 1 if batches give other tokens than the masked model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for batching.json")
    parser.add_argument("--requests", type=_numbers, default=[1, 8, 32, 64], help="requests at once")
    parser.add_argument("--plain", type=_numbers, default=[1, 8], help="those that the model as loaded runs, too")
    parser.add_argument("--prompt", type=int, default=1024, help="tokens of a prompt")
    parser.add_argument("--new", type=int, default=256, help="tokens that follow")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=1, help="timed batches of each kind")
    parser.add_argument("--tiny", action="store_true", help="a tiny model")
    return 0 if run(parser.parse_args(arguments)) else 1


if __name__ == "__main__":
    sys.exit(main())
