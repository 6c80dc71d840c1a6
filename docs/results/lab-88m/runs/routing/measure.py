"""Measure how adapters route a text, in float32, and write a run's records: `python measure.py --help`."""

import argparse
import shlex
import sys
from pathlib import Path

from wide.cli.loading import held_out_documents, load_base
from wide.cli.measuring import HeldOut, evaluation_records
from wide.cli.options import EvalOptions, ModelOptions
from wide.data.tokenizer import load_tokenizer
from wide.models.adapter import load
from wide.records import Record, RecordFile


def main() -> None:
    """Measure the dense model once, then each adapter, into OUTPUT/NAME/records.jsonl."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--adapter", action="append", required=True, metavar="NAME=FOLDER")
    parser.add_argument("--data", required=True, help="a file of texts")
    parser.add_argument("--name", required=True, help="what to call the text")
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--window", type=int, default=2048)
    parser.add_argument("--output", type=Path, required=True)
    given = parser.parse_args()

    # Weights in bfloat16 would leave the flips out: only a model that runs in float32 has anything to round.
    model_options = ModelOptions(model=given.model, dtype="float32", device="cpu")
    scoring = EvalOptions(data=given.data, tokens=given.tokens, window=given.window, batch_size=2)
    documents, _ = held_out_documents(given.data, scoring, text_field="text")
    tokenizer = load_tokenizer(given.model)
    command = " ".join(["python", Path(sys.argv[0]).name, *map(shlex.quote, sys.argv[1:])])
    dense = None
    for named in given.adapter:
        name, folder = named.split("=", 1)
        records = RecordFile(given.output / name / "records.jsonl", device="CPU")
        facts = {"description": name, "model": given.model, "held-out text": given.name, "command": command}
        records.append(Record(subject="run", metric=key, value=value, unit="text") for key, value in facts.items())
        held_out = HeldOut(documents, given.name, scoring, tokenizer, records)
        model = load_base(model_options)
        if dense is None:
            dense = held_out.measure(model, "dense")
        else:
            records.append(evaluation_records("dense", dense.model, None, given.name))
        load(model, folder)
        held_out.measure(model, "stage 1")
        held_out.measure_routing(model, "stage 1")


if __name__ == "__main__":
    main()
