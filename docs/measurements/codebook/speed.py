"""What a codebook of FFN masks is worth in time: python docs/measurements/codebook/speed.py OUT product|forward ...   (PYTHONPATH=src, one H200)

product: the down product of Llama-3.1-8B (G = 128) beside cuBLAS, for codebooks of several sizes, sorting and listing charged.
forward LENGTH: a prefill of 32 layers, dense, routed with independent masks, and routed with FFN masks of codebooks.
Codewords are random (each group in half of them), tokens choose theirs at random: what correlated ones would share is left out.
"""

import dataclasses
import json
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
from product import Codebook

from wide.kernels.gemm_k_rows import gemm_k_rows
from wide.kernels.operator_table import OperatorTable
from wide.kernels.products import GatedWeights, gated_product
from wide.kernels.tuning import Choice
from wide.profiling.timing import time_interleaved

OUT = Path(sys.argv[1])
HIDDEN, FFN, SIZE = 4096, 14336, 128
GROUPS = FFN // SIZE
began, records = time.time(), []


def say(*words: object) -> None:
    print(f"{time.time() - began:6.1f}", *words, flush=True)


def keep(times: dict, **facts: object) -> None:
    for name, timing in times.items():
        speedup = times["dense"].median_us / timing.median_us
        records.append({**facts, "candidate": name, **dataclasses.asdict(timing), "speedup": speedup})
        say(facts, f"{name}: {timing.median_us:.1f} us [{timing.low_us:.1f}-{timing.high_us:.1f}] x{speedup:.3f}")
    (OUT / "codebook-speed.json").write_text(json.dumps(records, indent=1) + "\n")


def random_book(size: int, seed: int) -> Codebook:
    return Codebook(torch.rand(size, GROUPS, generator=torch.Generator().manual_seed(seed)).cuda() < 0.5)


def product(h: torch.Tensor, weight: torch.Tensor, bits: torch.Tensor, book: Codebook) -> torch.Tensor:
    """Return the product of rows that choose codewords by `bits`, sorting and listing included."""
    return gemm_k_rows(h, weight, book.reorder(bits), group_size=h.shape[1] // book.masks.shape[1], backend="cuda")


def executed(unions: torch.Tensor) -> tuple[float, float]:
    """Return the shares that consumers multiply and that tiles load."""
    bits = unions[:, :, None] >> torch.arange(32, device="cuda") & 1
    tiles = bits[0::2] | bits[1::2]
    return bits.sum().item() / (len(bits) * GROUPS), tiles.sum().item() / (len(tiles) * GROUPS)


def race_product() -> None:
    torch.manual_seed(17)
    weight = torch.randn(HIDDEN, FFN, device="cuda", dtype=torch.bfloat16) * FFN**-0.5
    for rows in (4096, 16384):
        h = torch.randn(rows, FFN, device="cuda", dtype=torch.bfloat16)
        candidates, facts = {"dense": lambda: h @ weight.t()}, {}
        for size in (8, 16, 32, 64, 128, 256):
            book = random_book(size, size)
            which = torch.randint(size, (rows,), device="cuda")
            bits, mask = book.bits[which], book.masks[which]
            holes = torch.where(mask.repeat_interleave(SIZE, 1), h, float("nan"))
            zeros = torch.where(mask.repeat_interleave(SIZE, 1), h, 0)
            some = torch.randperm(rows, device="cuda")[:256]
            got = product(holes, weight, bits, book)[some].float()
            wanted = zeros[some].float() @ weight.float().t()
            error = ((got - wanted).norm() / wanted.norm()).item()
            assert error < 5e-3, (rows, size, error)
            facts[size] = (error, *executed(book.reorder(bits).unions))
            say(rows, size, "error", f"{error:.1e}", "executed by units, tiles: %.3f %.3f" % facts[size][1:])
            candidates[f"C = {size}"] = lambda bits=bits, book=book: product(h, weight, bits, book)
            del holes, zeros
        times = time_interleaved(candidates, rounds=10)
        keep(times, what="down", rows=rows, executed={f"C = {size}": found for size, found in facts.items()})


class Patched:
    """Replaces a decoder's FFNs by ones whose down product goes by codewords; their choice is charged."""

    def __init__(self, decoder, rows: int, size: int) -> None:
        self.decoder = decoder
        self.original = decoder._feed_forward
        self.layers, masks = {}, []
        for index, layer in enumerate(decoder.layers):
            book = random_book(size, 1000 * size + index)
            which = torch.randint(size, (rows,), device="cuda")
            scores = torch.randn(32, size, device="cuda")
            self.layers[layer.ffn.down.data_ptr()] = (book, book.bits[which], scores)
            masks.append(book.masks[which])
        self.inner = torch.randn(rows, 32, device="cuda")
        self.masks = masks

    def feed_forward(self, weights, x, mask, shared):
        book, bits, scores = self.layers[weights.down.data_ptr()]
        # What choosing costs beyond the router that runs: a score for each codeword, the best, its bits and its mask.
        best = (self.inner @ scores).argmax(1)
        self.chosen = book.bits[best], book.masks[best]
        gated = GatedWeights(weights.gate, weights.up, weights.gate_bias, weights.up_bias, weights.activation)
        sparse = Choice(backend="triton")
        h = gated_product(x, gated, mask, shared.run.table.with_rules("down", ((1, sparse),)))
        return product(h, weights.down, bits, book)

    def call(self, call):
        def run():
            self.decoder._feed_forward = self.feed_forward
            try:
                return call()
            finally:
                self.decoder._feed_forward = self.original

        return run


def race_forward(length: int) -> None:
    from wide.config import WideConfig
    from wide.models.attach import attach
    from wide.profiling.endtoend_races import operator_table
    from wide.profiling.synthetic import random_masks, random_model
    from wide.runtime.decoder import Decoder
    from wide.runtime.run import Run, force

    device = torch.device("cuda")
    model = random_model("llama-3.1-8b", num_layers=None, device=device, dtype=torch.bfloat16)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    attach(model, WideConfig(ffn_group_size=SIZE, attention_group_size=None))
    model.eval()
    decoder = Decoder(model, max_length=length + 64, checked=False)
    say("model ready")
    ids = torch.randint(0, model.config.vocab_size, (1, length), device=device)
    lengths = torch.full((1,), length, dtype=torch.int32, device=device)
    cache = decoder.new_cache(1, length)
    table = operator_table(decoder, (0.5, 0.5))
    masks = random_masks(decoder.layers, length, (0.5, 0.5))
    candidates = {
        "dense": lambda: decoder.prefill(ids, lengths, cache, Run(routed=False, table=OperatorTable(backend="triton"))),
        "independent masks": lambda: decoder.prefill(ids, lengths, cache, Run(table=table, forced=masks)),
    }
    for size in (16, 64, 256):
        patched = Patched(decoder, length, size)
        own = force(decoder.layers, [(None, mask) for mask in patched.masks])
        forced = [(attention, ffn) for (attention, _), (_, ffn) in zip(masks, own, strict=True)]
        call = lambda forced=forced: decoder.prefill(ids, lengths, cache, Run(table=table, forced=forced))
        by_codes = patched.call(call)
        wanted, got = call().float(), by_codes().float()
        error = ((got - wanted).norm() / wanted.norm()).item()
        say(length, size, "against the same masks with a dense down product:", f"{error:.1e}")
        assert error < 7e-2, error
        candidates[f"C = {size}"] = by_codes
        if size == 64:
            candidates["C = 64, down dense"] = call
    times = time_interleaved(candidates, rounds=6 if length > 8192 else 10)
    keep(times, what="prefill", tokens=length)


if __name__ == "__main__":
    OUT.mkdir(parents=True, exist_ok=True)
    with torch.no_grad():
        if sys.argv[2] == "product":
            race_product()
        else:
            for word in sys.argv[3:]:
                race_forward(int(word))
                torch.cuda.empty_cache()
