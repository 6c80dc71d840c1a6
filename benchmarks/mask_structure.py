"""What trained masks let the products with skipped inputs (down, O) gain: executed shares, sweeps, estimated times.

Usage: python -m benchmarks.mask_structure --model M --adapter A --out DIR [--text python-docs] [--rows 16384]

Every half-layer's masks over some text, beside masks with the same rate per group but nothing else in common. Needs no
GPU: times are estimates from measured parts (`benchmarks.mask_times`). Results go to DIR/mask-structure.json.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from torch import nn

from benchmarks.mask_tiles import (
    MOSTLY_OFF,
    MOSTLY_ON,
    Execution,
    Mask,
    by_rate,
    clustered_rows,
    gray_rows,
    ideal,
    in_order,
    in_super_blocks,
    informative_groups,
    neighbours,
    one_order,
    rare_groups,
    shuffled,
)
from benchmarks.mask_times import TIME_MODELS
from wide.data.batches import TokenBlocks, load_blocks
from wide.data.corpus import PYTHON_DOCS
from wide.data.tokenizer import check_vocabulary, load_tokenizer, longest_input
from wide.errors import WideError
from wide.evaluation.inference import model_device
from wide.models.adapter import load, read_config
from wide.models.dial import set_sparsity
from wide.models.observe import capture_routing, judging
from wide.models.pretrained import load_pretrained
from wide.records import versions

TILES = (64, 128)
SUPER_BLOCKS = (4, 8, 16, 28)
_BATCH = 4
_HALVES = ("ffn", "attention")


def recorded_masks(model: nn.Module, blocks: TokenBlocks, rows: int) -> dict[tuple[int, str], Mask]:
    """Return the masks of every routed half-layer over the first tokens of a text, in their order.

    Args:
        model: An attached model; runs in evaluation mode.
        blocks: Of the text.
        rows: Tokens to take; fewer if the text has fewer.

    Returns:
        (layer, 'attention' or 'ffn') -> bool [rows, N_G].
    """
    found: dict[tuple[int, str], list[Mask]] = {}
    device = model_device(model)
    with judging(model), capture_routing(model) as routing:
        for batch in blocks.in_order(_BATCH, max_blocks=-(-rows // blocks.sequence_length)):
            model(input_ids=batch.input_ids.to(device), use_cache=False)
            for layer, masks in enumerate(routing):
                for half in _HALVES:
                    mask = getattr(masks, half)
                    if mask is not None:
                        found.setdefault((layer, half), []).append(mask.flatten(0, 1).cpu().numpy())
    return {key: np.concatenate(parts)[:rows] for key, parts in found.items()}


def ways(mask: Mask, tile: int) -> Iterator[tuple[str, int, Execution]]:
    """Yield name, groups in a super-block and result of every way to put rows and groups in order.

    Args:
        mask: bool [M, N_G].
        tile: Rows in a tile.
    """
    num_rows, num_groups = mask.shape
    yield "natural", num_groups, in_order(mask, np.arange(num_rows), tile)
    sizes = [size for size in SUPER_BLOCKS if size < num_groups]
    for size in [*sizes, num_groups]:
        yield "neighbours", size, in_super_blocks(mask, neighbours(num_groups, size), tile)
    for size in sizes:
        yield "bundles", size, by_rate(mask, size, tile)
    for name, groups in (("informative", informative_groups(mask)), ("rare first", rare_groups(mask))):
        yield name, num_groups, in_order(mask, gray_rows(mask[:, groups]), tile)
    yield "rare of each", num_groups, in_order(mask, one_order(mask), tile)
    yield "clustered", num_groups, in_order(mask, clustered_rows(mask, tile), tile)


def structure(mask: Mask, half: str, *, tiles: Sequence[int] = TILES) -> list[dict[str, Any]]:
    """Return one JSON-ready object per tile and way: executed share, sweeps, estimated microseconds, ratio to dense.

    Args:
        mask: bool [M, N_G].
        half: 'ffn' (the down product) or 'attention' (O).
        tiles: Rows in a tile.
    """
    times, groups = TIME_MODELS[half], mask.shape[1]
    facts = {"half": half, "rows": len(mask), "groups": groups, "ideal": ideal(mask)}
    found = []
    for tile in tiles:
        for name, size, execution in ways(mask, tile):
            estimated = times.estimate(execution, groups=groups, tile=tile)
            found.append(
                {
                    **facts,
                    "way": name,
                    "tile": tile,
                    "groups_per_block": size,
                    **asdict(execution),
                    "estimated_us": estimated,
                    "estimated_ratio": times.dense_us / estimated,
                }
            )
    return found


def means(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the mean over layers of records that differ in the layer only; ratios are of the mean times."""
    alike: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for record in records:
        key = tuple(record[name] for name in ("masks", "half", "groups", "way", "tile", "groups_per_block"))
        alike.setdefault(key, []).append(record)
    found = []
    for members in alike.values():
        mean = dict(members[0]) | {"layer": None}
        for name in ("mostly_on", "mostly_off", "ideal", "executed", "super_blocks", "sweeps", "estimated_us"):
            mean[name] = fmean(member[name] for member in members)
        mean["estimated_ratio"] = TIME_MODELS[mean["half"]].dense_us / mean["estimated_us"]
        found.append(mean)
    return found


def _of_layers(masks: Mapping[tuple[int, str], Mask]) -> list[dict[str, Any]]:
    records = []
    for (layer, half), mask in masks.items():
        rates = mask.mean(0)
        classes = {"mostly_on": int((rates >= MOSTLY_ON).sum()), "mostly_off": int((rates <= MOSTLY_OFF).sum())}
        for name, shown in (("trained", mask), ("shuffled", shuffled(mask))):
            records += [{"masks": name, "layer": layer, **classes, **found} for found in structure(shown, half)]
    return records


def _table(records: Sequence[Mapping[str, Any]]) -> str:
    lines = [
        "half       tile  way            s  super-blocks  sweeps  ideal  executed: trained  shuffled  ratio: trained  "
        "shuffled"
    ]
    trained = [record for record in records if record["masks"] == "trained"]
    shuffles = [record for record in records if record["masks"] == "shuffled"]
    for own, other in zip(trained, shuffles, strict=True):
        lines.append(
            f"{own['half']:9s}  {own['tile']:4d}  {own['way']:11s}  {own['groups_per_block']:3d}  "
            f"{own['super_blocks']:12.1f}  {own['sweeps']:6.2f}  {own['ideal']:.3f}  {own['executed']:17.3f}  "
            f"{other['executed']:8.3f}  {own['estimated_ratio']:14.2f}  {other['estimated_ratio']:8.2f}"
        )
    return "\n".join(lines)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="hub name or folder of the base model")
    parser.add_argument("--adapter", type=Path, required=True, help="folder of the trained adapter")
    parser.add_argument("--out", type=Path, required=True, help="folder for mask-structure.json")
    parser.add_argument("--sparsity", type=float, help="turn the adapter's dial; default: as it was trained")
    parser.add_argument("--text", default=PYTHON_DOCS, help="'python-docs', a file, folder or data set")
    parser.add_argument("--split", help="of the text; default 'heldout' of python-docs, else all of it")
    parser.add_argument("--rows", type=int, default=16384, help="tokens")
    parser.add_argument("--sequence-length", type=int, default=1024, help="tokens of a sequence")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="auto")
    return parser


def _blocks(options: argparse.Namespace, model: nn.Module) -> TokenBlocks:
    split = options.split or ("heldout" if options.text == PYTHON_DOCS else None)
    length = min(options.sequence_length, longest_input(model) or options.sequence_length)
    blocks = load_blocks(options.text, load_tokenizer(options.model), sequence_length=length, split=split)
    check_vocabulary(blocks.largest_id, model)
    return blocks


def main(arguments: list[str] | None = None) -> int:
    """Record masks, judge them, write the records and print the means over layers."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        provenance = read_config(options.adapter)["provenance"]
        model = load(load_pretrained(options.model, dtype=options.dtype, device=options.device), options.adapter)
        if options.sparsity is not None:
            set_sparsity(model, options.sparsity)
        masks = recorded_masks(model, _blocks(options, model), options.rows)
    except WideError as error:
        parser.error(str(error))
    if not masks:
        parser.error(f"{options.adapter} decides nothing by token; name the adapter of a routed model")
    records = _of_layers(masks)
    summary = means(records)
    facts = {"model": options.model, "adapter": str(options.adapter), "text": options.text, "versions": versions()}
    content = {**facts, "provenance": provenance, "means": summary, "records": records}
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "mask-structure.json").write_text(json.dumps(content, indent=1) + "\n")
    sys.stdout.write(_table(summary) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
