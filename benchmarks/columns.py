"""The languages of the kernels side by side: what `wide bench` measures of each, as targets and tables of a page.

Usage: python -m benchmarks.columns --measure DIR [--out docs/measurements/targets/columns.json]
       python -m benchmarks.columns --records DIR... [--out ...]
       python -m benchmarks.columns --trained DIR --model M --adapter RUN/adapter   # records for the second form

The first runs the benches of `PARTS` on this machine's GPU, in a quarter of an hour at most, a third of it compilation
on 16 cores; the new languages must agree with their references in all cases first. The third races the down projection
under what the FFN routers of a trained model decide on held-out text: masks of its groups, as many as they are, over
groups of 128 channels here. `make tables` draws the pages.
Levels of skipping inside a tile are CuTe's; what they cost where nothing is left over is seen at 0 %, where every tile
is full, and what they save at few rows.
"""

import argparse
import datetime
import json
import statistics
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

import benchmarks.languages
import wide
from benchmarks.operators import SIZES, TIMED, candidate_backend, table
from benchmarks.races import measure as measure_race
from benchmarks.races import product_race
from benchmarks.targets import WIDE, head, measure, reached
from wide.data.batches import load_blocks
from wide.data.tokenizer import load_tokenizer
from wide.inference.choice.layer_sizes import candidates
from wide.kernels.reordering import PATTERN_GROUPS
from wide.models.observe import forward_without_head, judging, observe

_FOLDERS = Path(__file__).parents[1] / "src/wide/kernels", Path(benchmarks.languages.__file__).parent
_OUT = Path(__file__).parents[1] / "docs/measurements/targets/columns.json"
_OPERATORS = "wide bench --output DIR --operators gemm_mn,gemm_k,prefill,decode,gemv --quick true"
_ALL = f"{_OPERATORS} --backends triton,cuda,tilelang,cute --timed_only true"
_AGREE = f"{_OPERATORS} --backends tilelang,cute --rows 4096"
_HALF = f"{_ALL} --rows 16,64,256,1024,4096,16384"
_SHARES = {f"skipped-{share}": (f"{_ALL} --rows 4096 --sparsity 0.{share}", 60) for share in (0, 3, 7)}
PARTS = {"agree": (_AGREE, 420), "half": (_HALF, 200), **_SHARES}
"""What measures all rows: commands by the names of their folders, and the seconds that each may take."""
_TRAINED = "down trained"
_BY_ADAPTER = "python -m benchmarks.columns --trained DIR --model models/nano --adapter RUN/adapter"
_ROWS = (16, 64, 256, 1024, 4096, 16384)
_COMPARED = ("tilelang", "cute")
_BACKENDS = (*TIMED, *_COMPARED)
_LEAST_SECONDS = 1.0
# Tokens of a block of text that a trained model reads.
_BLOCK = 256
# Of the paper's levels: candidates of CuTe, whose tile is (level, stages).
_LEVELS = ("level 0", "level 1", "level 2")


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """One race of a bench.

    Args:
        operator: As pages call it.
        size: Rows, tokens or caches.
        share: That random masks skip.
        race: Its name in the records.
        floor: Least acceptable speed-up of the best new language; None where it is for orientation.
        goal: Wanted one.
    """

    operator: str
    size: str
    share: float
    race: str
    floor: float | None = None
    goal: float | None = None

    @property
    def what(self) -> str:
        """Its name among targets."""
        return f"{self.operator}, {self.size}, {self.share:.0%} skipped"

    @property
    def command(self) -> str:
        """What measures it."""
        if self.race == _TRAINED:
            return _BY_ADAPTER
        return PARTS["half" if self.share == 0.5 else f"skipped-{round(10 * self.share)}"][0]


def lines() -> Iterator[Line]:
    """Yield all rows, in order."""
    aims = {
        ("gate_up", 4096): (1.80, 1.95),
        ("gate_up", 16384): (1.85, 2.0),
        ("q", 16384): (1.75, 1.92),
        ("o", 16384): (1.40, 1.60),
    }
    products = {
        "gate_up": ("gate + up + SwiGLU", 128),
        "q": ("queries", 512),
        "o": ("output", 512),
        "down": ("down", 128),
    }
    for name, (operator, group) in products.items():
        shapes = [(rows, 0.5) for rows in _ROWS] + [(4096, share) for share in (0.0, 0.3, 0.7)]
        for rows, share in shapes:
            floor, goal = aims.get((name, rows), (None, None)) if share == 0.5 else (None, None)
            race = f"{name} G={group} p={1.0 - share} M={rows}"
            yield Line(operator=operator, size=f"{rows} rows", share=share, race=race, floor=floor, goal=goal)
    what = "down under masks of trained routers, over CUDA C++"
    yield Line(operator=what, size="16384 rows", share=0.5, race=_TRAINED, floor=1.0, goal=1.05)
    for share in (0.5, 0.0, 0.3, 0.7):
        for length, floor, goal in ((4096, 1.7, 1.95), (16384, 1.8, 2.05)):
            aim = {"floor": floor, "goal": goal} if share == 0.5 else {}
            race = f"prefill T={length} p={1.0 - share}"
            yield Line(operator="prefill attention", size=f"{length} tokens", share=share, race=race, **aim)
        for batch, length in ((32, 4096), (8, 32768)):
            aim = {"floor": 1.65, "goal": 1.85} if (share, batch) == (0.5, 32) else {}
            race = f"decode B={batch} T={length} p={1.0 - share}"
            yield Line(operator="decode attention", size=f"{batch} x {length} keys", share=share, race=race, **aim)
    for name, group in (("gate_up", 128), ("down", 128), ("query", 512), ("output", 512)):
        operator = {"gate_up": products["gate_up"][0], "query": "queries"}.get(name, name)
        race = f"gemv {name} M=1 G={group} p=0.5"
        yield Line(operator=operator, size="1 row", share=0.5, race=race, floor=1.7, goal=1.9)


def fill(
    contents: Iterable[Mapping[str, Any]], known: Sequence[Mapping[str, Any]] = (), *, commit: str, date: str
) -> list[dict[str, Any]]:
    """Return one JSON-ready object for each row.

    Args:
        contents: Files of `wide bench`; later ones replace what earlier ones measured.
        known: Rows of earlier measurements; one that has a language which is not measured now stays.
        commit: Of the code that was measured.
        date: Of the measurement.
    """
    races: dict[str, tuple[Mapping[str, Any], list[Mapping[str, Any]]]] = {}
    for content in contents:
        found: dict[str, list[Mapping[str, Any]]] = {}
        for record in content["records"]:
            found.setdefault(record.get("sweep") or record["race"], []).append(record)
        races |= {name: (content, records) for name, records in found.items()}
    before = {row["what"]: row for row in known}
    rows = []
    for line in lines():
        row: dict[str, Any] = {"what": line.what, "operator": line.operator, "size": line.size, "share": line.share}
        row |= {"value": None, "floor": line.floor, "goal": line.goal, "unit": "ratio", "reached": "not measured"}
        row |= {"device": None, "date": None, "commit": None, "command": line.command, "languages": {}}
        content, records = races.get(line.race, ({}, []))
        languages = _languages(records)
        new = [languages[name] for name in _COMPARED if name in languages]
        if line.race == _TRAINED:
            # A race for each layer, and a peer that has as many masks.
            layers = [found for name, found in races.items() if name.startswith(_TRAINED)]
            content = layers[-1][0] if layers else {}
            each = [_languages(found) for of, found in layers if of is content]
            common = [name for name in (each or [{}])[0] if all(name in of for of in each)]
            languages = {name: round(statistics.median(of[name] for of in each), 4) for name in common}
            new = [
                round(statistics.median(of[name] / of["cuda"] for of in each), 4)
                for name in _COMPARED
                if name in languages and "cuda" in languages
            ]
        known_row = before.get(line.what, {"languages": {}})
        if known_row["languages"].keys() - languages.keys():
            # Figures of one row are of one run.
            row.update(known_row, floor=line.floor, goal=line.goal)
            rows.append(row)
            continue
        if languages:
            row |= {"languages": languages, "device": content["device"], "date": date, "commit": commit}
        if new:
            row["value"] = max(new)
            row["reached"] = reached(line.floor, line.goal, row["value"])
        rows.append(row)
    return rows


def _languages(records: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Return the best speed-up of each language over the dense peer, and of each of CuTe's levels.

    Where a language has a candidate that charges the reordering, or the operator as it ships beside tiles that were
    tried, that one alone counts.
    """
    best: dict[str, float] = {}
    found = [(candidate_backend(record["candidate"]), record) for record in records if "speedup" in record]
    told = {(backend, word) for backend, record in found for word in _words(record["candidate"])}
    for backend, record in found:
        wanted = next((word for word in ("charged", "operator") if (backend, word) in told), None)
        if backend == "dense" or (wanted is not None and wanted not in _words(record["candidate"])):
            continue
        names = [backend]
        if backend == "cute" and record.get("choice", {}).get("tile"):
            names.append(_LEVELS[int(record["choice"]["tile"][0])])
        for name in names:
            best[name] = max(best.get(name, 0.0), round(record["speedup"], 4))
    return {name: best[name] for name in (*_BACKENDS, *_LEVELS) if name in best}


def _words(candidate: str) -> list[str]:
    return candidate.replace(",", "").split()


def code(contents: Iterable[Mapping[str, Any]], known: Sequence[Mapping[str, Any]] = ()) -> list[dict[str, Any]]:
    """Return what each language takes of each operator: lines of its files, and seconds of nvcc for a kernel, if known.

    Args:
        contents: Files of `wide bench`, which say how long kernels took while as many compiled as there are cores.
        known: Of earlier measurements.
    """
    seconds: dict[tuple[str, str], list[float]] = {}
    entries = (entry for content in contents for entry in content.get("compiled", ()))
    # What took no time came from a cache.
    for each in (entry for entry in entries if entry.get("seconds", 0.0) >= _LEAST_SECONDS):
        name = each["kernel"].split()[0]
        language = "cute" if "_cute" in name else "tilelang"
        operator = name.removeprefix("make_").split("_cute")[0].removesuffix("_rows")
        seconds.setdefault((operator, language), []).append(each["seconds"])
    before = {(row["operator"], row["language"]): row["compile_s"] for row in known}
    found = []
    for operator in ("gemm_mn", "gemm_k", "attention_prefill", "attention_decode", "gemv", "native"):
        # What kernels of several operators share lies beside the folders of the languages that are compared.
        places = [_FOLDERS[0] / operator, _FOLDERS[1] / operator if operator != "native" else _FOLDERS[1]]
        every = [path for place in places if place.is_dir() for path in place.iterdir()]
        for language in _BACKENDS:
            files = [path for path in every if _language(path) == language]
            lines = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files)
            key = operator, language
            measured = round(statistics.median(seconds[key]), 1) if key in seconds else before.get(key)
            if files:
                found.append({"operator": operator, "language": language, "lines": lines, "compile_s": measured})
    return found


def _language(path: Path) -> str | None:
    """Return the language that a file is written in or serves, None if it serves all."""
    if path.suffix == ".cu":
        return "cute" if "cute" in path.stem else "cuda"
    shared = {
        "cute": "cute",
        "cute_hopper": "cute",
        "tilelang": "tilelang",
        "hopper": "cuda",
        "launch": "cuda",
        "build": "cuda",
    }
    if path.parent.name in ("native", "languages"):
        return shared.get(path.stem)
    return path.stem[1:] if path.stem[1:] in _BACKENDS else None


def race_trained(model: str, adapter: str, out: Path, device: torch.device) -> None:
    """Race down at 16384 rows under the masks of each layer of a model's FFN routers; write out/operators.json."""
    attached = wide.load(model, adapter, dtype=torch.bfloat16).to(device)
    blocks = load_blocks("python-docs", load_tokenizer(model), sequence_length=_BLOCK, split="heldout")
    ids = blocks.batch_at(0, batch_size=_ROWS[-1] // _BLOCK).input_ids.to(device)
    with judging(attached), observe(attached) as routing:
        forward_without_head(attached, ids)
    content: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "records": []}
    out.mkdir(parents=True, exist_ok=True)
    for number, layer in enumerate(routing):
        if layer.ffn is None:
            continue
        mask = layer.ffn.flatten(0, 1).bool()
        rows, groups = mask.shape
        sizes = replace(SIZES, ffn_width=128 * groups, ffn_groups=groups)
        active = round(mask.float().mean().item(), 4)
        tried = [
            choice
            for choice in candidates("down", sizes, rows, device, quick=True)
            if choice.groups_per_block > PATTERN_GROUPS
        ]
        race = product_race("down", sizes, rows, active, device=device, choices=tried, mask=mask)
        found = measure_race(replace(race, name=f"{_TRAINED}, layer {number}"), rounds=10)
        sys.stdout.write(f"{table(found, tolerance=race.tolerance)}\n")
        content["records"] += found
        (out / "operators.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def contents(folders: Iterable[Path]) -> Iterator[dict[str, Any]]:
    """Yield what benches wrote to folders."""
    for folder in folders:
        for path in sorted(folder.glob("*.json")):
            content = json.loads(path.read_text(encoding="utf-8"))
            if "records" in content:
                yield content


def main(arguments: list[str] | None = None) -> int:
    """Fill in the rows and print those that have a floor."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--records", type=Path, nargs="+", help="folders of wide bench")
    source.add_argument("--measure", type=Path, help="folder for the records of all parts, measured now")
    source.add_argument("--trained", type=Path, help="folder for the records of a trained model's masks, measured now")
    parser.add_argument("--model", help="the model whose masks they are")
    parser.add_argument("--adapter", help="its routers")
    parser.add_argument("--out", type=Path, default=_OUT, help="the file to write")
    parser.add_argument("--commit", default=None, help="of the measured code; default: this checkout's")
    parser.add_argument("--date", default=datetime.datetime.now(datetime.UTC).date().isoformat(), help="YYYY-MM-DD")
    options = parser.parse_args(arguments)
    if options.trained:
        if not options.model or not options.adapter:
            parser.error("--trained wants --model and --adapter, whose routers decide")
        race_trained(options.model, options.adapter, options.trained, torch.device("cuda"))
        return 0
    folders = options.records or measure(options.measure, PARTS, WIDE, "*.json")
    known = json.loads(options.out.read_text()) if options.out.is_file() else []
    rows = fill(contents(folders), known, commit=options.commit or head(), date=options.date)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(rows, indent=1) + "\n")
    path = options.out.with_name("code.json")
    lines_of = code(contents(folders), json.loads(path.read_text()) if path.is_file() else [])
    path.write_text(json.dumps(lines_of, indent=1) + "\n")
    for row in rows:
        if row["floor"] is not None:
            value = "-" if row["value"] is None else f"{row['value']:.2f}"
            name = f"{row['operator']}, {row['size']}"
            sys.stdout.write(f"{name:48s} {value:>6s} {row['floor']:5.2f} {row['goal']:5.2f}  {row['reached']}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
