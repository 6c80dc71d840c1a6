r"""What it costs in quality if each token takes its FFN mask of a layer from a codebook.

Usage: python docs/measurements/codebook/codebook.py --model MODEL --data TRAIN --eval-data HELDOUT --steps 600 \
    --codes 16,64,256 --out DIR

Stage 1 by a recipe of the project (or an adapter of one), then per size of the codebook: masks snapped without
training, and stage 1 continued with snapped masks, beside free ones for as many steps. What was found so far is in
DIR/codebook.json.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml
from codewords import Codebook, Training, ffn_masks, ffn_routers, fit_codebooks, snapped, tiles_of
from torch import Tensor

from wide.cli.arguments import build
from wide.cli.loading import held_out_documents
from wide.cli.options import EvalOptions
from wide.cli.recipe_files import find_recipe
from wide.config import ObjectiveConfig, StageConfig, WideConfig
from wide.data.batches import TokenBlocks, blocks_of_texts, load_blocks
from wide.data.tokenizer import load_tokenizer
from wide.evaluation.evaluate import evaluate
from wide.models.adapter import load
from wide.models.attach import attachment
from wide.models.pretrained import load_pretrained
from wide.records import versions
from wide.training.stages import prune
from wide.training.text_source import ShiftedSource
from wide.training.trainer import micro_batch_size

ROWS = (4096, 16384)
# A batch of training text that no run here reaches.
_FAR_STEP = 1_000_000


class Experiment:
    """One model, its texts, and the file of results.

    Args:
        options: Of the command line.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        """Load model and texts."""
        self.options = options
        self.found: dict[str, Any] = {"options": {k: str(v) for k, v in vars(options).items()}, "versions": versions()}
        self.found |= {"seconds": {}, "snapped": {}, "trained": {}}
        settings = yaml.safe_load(find_recipe(options.recipe).read_text(encoding="utf-8"))
        changes = {} if options.group_size is None else {"ffn_group_size": options.group_size}
        self.config = build(WideConfig, settings, **changes)
        changes = {"sparsity": settings["sparsity"]} | ({} if options.target is None else {"target": options.target})
        self.objective = build(ObjectiveConfig, settings.get("objective", {}), **changes)
        given = {name: getattr(options, name) for name in ("batch_size", "sequence_length", "learning_rate")}
        changes = {name: value for name, value in given.items() if value is not None}
        self.stage = build(StageConfig, settings["train"], steps=options.steps, checkpoint_every=0, **changes)
        self.steps_before = 0
        with self.phase("load"):
            self.model = load_pretrained(options.model, dtype=options.dtype, device=options.device)
            self._read_texts()

    def _read_texts(self) -> None:
        options, tokenizer = self.options, load_tokenizer(self.options.model)
        self.blocks: TokenBlocks = load_blocks(
            options.data,
            tokenizer,
            sequence_length=self.stage.sequence_length,
            split=None if options.eval_data else "train",
            max_documents=options.max_documents,
            cache=options.cache,
            seed=self.stage.seed,
        )
        scoring = EvalOptions(data=options.eval_data, tokens=options.eval_tokens, window=options.window)
        documents, name = held_out_documents(options.data, scoring, text_field="text")
        # Tokenised once for all evaluations; joined as `wide evaluate` joins them.
        joined = "\n\n".join(document.text for document in documents)
        self.held_out = blocks_of_texts([joined], tokenizer, sequence_length=options.window)
        self.found["text"] = {"train_tokens": self.blocks.num_tokens, "held_out": name}
        length = self.stage.sequence_length
        count = -(-options.fit_tokens // length)
        self.fit_ids = self._on_device(self.blocks.batch_at(_FAR_STEP, batch_size=count).input_ids)
        wanted = min(max(ROWS) // options.window, len(self.held_out))
        # From all over the text.
        chosen = [i * len(self.held_out) // wanted for i in range(wanted)]
        self.row_ids = self._on_device(self.held_out.batch(chosen).input_ids)

    def _on_device(self, ids: Tensor) -> Tensor:
        return ids.to(next(self.model.parameters()).device)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a phase, print its seconds and write what was found so far."""
        began = time.monotonic()
        yield
        self.found["seconds"][name] = round(time.monotonic() - began, 1)
        print(f"{name}: {self.found['seconds'][name]:.1f} s", flush=True)
        self.options.out.mkdir(parents=True, exist_ok=True)
        (self.options.out / "codebook.json").write_text(json.dumps(self.found, indent=1) + "\n")

    def measured(self) -> dict[str, Any]:
        """Return held-out perplexity, executed shares, and what tiles of sorted rows would execute."""
        report = evaluate(
            self.model,
            self.held_out,
            batch_size=self.options.eval_batch_size,
            max_windows=self.options.eval_tokens // self.options.window,
            compare_dense=False,
        )
        perplexity, skipped = report.model.perplexity, report.sparsity
        assert perplexity is not None
        assert skipped is not None
        names = ("attention", "ffn", "mean", "linear_flops")
        found: dict[str, Any] = {"perplexity": perplexity.perplexity, "stderr_nats": perplexity.stderr}
        found["executed"] = {name: round(1 - getattr(skipped, name), 4) for name in names}
        found["executed_ffn_layers"] = [None if ffn is None else round(1 - ffn, 4) for _, ffn in skipped.layers]
        masks = ffn_masks(self.model, self.row_ids)
        found["tiles"] = {str(rows): _mean_tiles([_spread(mask, rows) for mask in masks]) for rows in ROWS}
        print("   ", _line(found), flush=True)
        return found

    def first_stage(self) -> None:
        """Attach trained routers."""
        if self.options.adapter is not None:
            load(self.model, self.options.adapter)
            return
        prune(self.model, self.blocks, config=self.config, objective=self.objective, stage=self.stage)

    def shares(self) -> list[float]:
        """Return the share of the fitting text that each FFN router executes now."""
        return [float(mask.float().mean()) for mask in ffn_masks(self.model, self.fit_ids)]

    def snap(self, where: dict[str, Any]) -> dict[int, list[Codebook]]:
        """Measure codebooks of all sizes without training, and return them."""
        shares, books = self.shares(), {}
        for size in self.options.codes:
            books[size] = fit_codebooks(self.model, self.fit_ids, size, shares)
            with snapped(self.model, books[size]):
                where[str(size)] = self.measured()
        return books

    def train_on(self, books: list[Codebook] | None, gradient: str) -> None:
        """Continue stage 1 on text that it has not read, with free masks or with codewords, and measure.

        Args:
            books: Of each FFN router; None leaves masks free.
            gradient: See `Snapped`.
        """
        options, stage = self.options, self.stage
        steps = options.extra_steps or options.steps
        source = ShiftedSource(self.blocks, self.steps_before * stage.batch_size)
        objective = replace(self.objective, ramp=0.0)
        later = replace(stage, steps=steps, learning_rate=options.extra_learning_rate or stage.learning_rate)
        if options.gently:
            # As inference executes, from the temperature on at which stage 1 ended.
            later = replace(later, noise=0.0, temperature_start=stage.temperature_end)
            later = replace(later, learning_rate=stage.learning_rate * options.gently)
        if books is None:
            prune(self.model, source, objective=objective, stage=later)
            self.found["trained"]["free"] = self.measured()
            return
        # Training begins at a threshold of 0; the codebooks keep the shares of the calibrated one.
        thresholds = [router.threshold for router in ffn_routers(self.model)]
        books = [book.with_threshold(value) for book, value in zip(books, thresholds, strict=True)]
        forwards = steps * stage.batch_size // micro_batch_size(stage, 1)
        every = max(1, round(forwards / (options.refits + 1)))
        how = Training(
            gradient=gradient,
            commitment=options.commitment,
            refit_at=frozenset(range(every, forwards, every)) if options.refits else frozenset(),
        )
        with snapped(self.model, books, how):
            prune(self.model, source, objective=objective, stage=later)
            self.found["trained"][f"{len(books[0].code)} {gradient}"] = self.measured()

    def run(self) -> None:
        """Carry out all phases."""
        with self.phase("stage 1"):
            self.first_stage()
        self.steps_before = attachment(self.model).provenance["prune"]["steps"]
        with self.phase("free"):
            self.found["free"] = self.measured()
        with self.phase("snap"):
            books = self.snap(self.found["snapped"])
        start = _state(self.model)
        for gradient in self.options.gradients:
            for size in self.options.train_codes:
                with self.phase(f"train on, {size} codewords, {gradient}"):
                    _restore(self.model, start)
                    self.train_on(books[size], gradient)
        if self.options.train_free:
            with self.phase("train on, free"):
                _restore(self.model, start)
                self.train_on(None, "")
            with self.phase("snap after training on"):
                self.snap(self.found.setdefault("trained free, snapped", {}))


def _state(model: Any) -> list[tuple[dict[str, Tensor], float]]:
    return [
        ({name: value.clone() for name, value in router.state_dict().items()}, router.threshold)
        for router in attachment(model).routers()
    ]


def _restore(model: Any, state: list[tuple[dict[str, Tensor], float]]) -> None:
    for router, (values, threshold) in zip(attachment(model).routers(), state, strict=True):
        router.load_state_dict(values)
        router.threshold = threshold


def _spread(mask: Tensor, rows: int) -> Tensor:
    """Return so many rows from all over a text, in pieces of 128."""
    pieces = mask.unflatten(0, (-1, 128))
    wanted = min(rows // 128, len(pieces))
    return pieces[[i * len(pieces) // wanted for i in range(wanted)]].flatten(0, 1)


def _mean_tiles(masks: list[Tensor]) -> dict[str, Any]:
    layers = [tiles_of(mask) for mask in masks]
    found: dict[str, Any] = {name: round(fmean(layer[name] for layer in layers), 4) for name in layers[0]}
    return found | {"rows": len(masks[0])}


def _line(found: dict[str, Any]) -> str:
    shares = ", ".join(f"{name} {value:.3f}" for name, value in found["executed"].items())
    line = f"perplexity {found['perplexity']:.2f}, executed: {shares}"
    for rows, tiles in found["tiles"].items():
        line += f"; {rows} rows: ideal {tiles['ideal']:.3f}, sorted {tiles['sorted_64']:.3f}/{tiles['sorted_128']:.3f}"
        line += f", padded {tiles['padded_64']:.3f}"
    return line


def _sizes(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", required=True, help="hub name or folder of the base model")
    add("--data", required=True, help="training text, as for `wide prune`")
    add("--eval-data", help="held-out text; default: the held-out documents of --data")
    add("--adapter", type=Path, help="of stage 1; default: train one")
    add("--recipe", default="fitted-50", help="recipe or YAML file of stage 1 (as published: small)")
    add("--target", choices=("mean", "uniform", "linear_flops"), help="measure of sparsity; default: the recipe's")
    add("--group-size", type=int, help="channels of an FFN group; default: the recipe's")
    add("--steps", type=int, required=True, help="of stage 1")
    add("--extra-steps", type=int, help="of training on; default: as many")
    add("--batch-size", type=int, help="sequences of a step; default: the recipe's")
    add("--sequence-length", type=int, help="tokens; default: the recipe's")
    add("--learning-rate", type=float, help="default: the recipe's")
    add("--codes", type=_sizes, default=[16, 64, 256], help="sizes of the codebooks")
    add("--train-codes", type=_sizes, help="those that are trained on; default: all; '' for none")
    add("--gently", type=float, default=0.0, help="train on without noise, at this multiple of the learning rate")
    add("--gradients", type=lambda text: text.split(","), default=["groups"], help="'groups', 'choice' or both")
    add("--no-train-free", dest="train_free", action="store_false", help="leave the free router's further steps out")
    add("--refits", type=int, default=9, help="times that codebooks are fitted anew while training on")
    add("--commitment", type=float, default=0.0, help="see `Training` in codewords.py")
    add("--extra-learning-rate", type=float, help="of training on; default: as before")
    add("--fit-tokens", type=int, default=32768, help="training tokens that codebooks are fitted to")
    add("--eval-tokens", type=int, default=131072)
    add("--eval-batch-size", type=int, default=8)
    add("--window", type=int, default=1024, help="tokens that the evaluation sees at once")
    add("--max-documents", type=int, help="of the training text")
    add("--cache", type=Path, help="folder where packed tokens are kept")
    add("--dtype", default="auto")
    add("--device", default="auto")
    add("--out", type=Path, required=True, help="folder for codebook.json")
    return parser


def main() -> int:
    """Run the experiment."""
    parser = _parser()
    options = parser.parse_args()
    if options.train_codes is None:
        options.train_codes = options.codes
    if not set(options.train_codes) <= set(options.codes):
        parser.error(f"--train-codes {options.train_codes} must be among --codes {options.codes}")
    began = time.monotonic()
    Experiment(options).run()
    print(f"all: {time.monotonic() - began:.1f} s; {options.out / 'codebook.json'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
