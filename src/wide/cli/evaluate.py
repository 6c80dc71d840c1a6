"""`wide eval`: perplexity and tasks of a model, pruned and dense."""

import json
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext, redirect_stdout
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from wide.cli.arguments import Arguments
from wide.errors import UsageError
from wide.runs.process import is_main_process, say
from wide.runs.settings import AdapterOptions, EvalOptions, Parallel, ScoredTasks, WeightsFormat, build

if TYPE_CHECKING:
    from wide.evaluation.report import EvaluationReport
    from wide.records import Record, RecordFile
    from wide.runs.folder import RunFolder


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskOptions(ScoredTasks):
    """What else is evaluated, and where results go.

    Args:
        text_field: Field that holds the text, where rows have fields.
        output: Folder for evaluation.json, records.jsonl and the resolved configuration; null writes nothing.
        parallel: As for wide prune; 'auto' counts the weights alone.
        weights: With --fused, format of the linear layers' weights; 'int8' is made of the model's own;
            'w8a8' also rounds what long prompts multiply.
    """

    text_field: str = "text"
    output: str | None = None
    parallel: Parallel = "auto"
    weights: WeightsFormat = "model"


def arguments() -> Arguments:
    flags = Arguments(
        "eval",
        "Score a model on held-out text and tasks, and the dense model with it.",
        usage="--model M --adapter RUN --data D [FLAGS]",
        first=("model", "adapter", "data", "tasks", "sparsity", "output"),
    )
    flags.add_fields(AdapterOptions)
    flags.add_fields(EvalOptions, tokens=None)
    flags.add_fields(TaskOptions)
    flags.add_switch(
        "fused", "Score the adapter through the fused operators, with the share of decisions that differ from masks."
    )
    flags.add_switch("json", "Print the result as JSON instead of a table.")
    flags.add_switch("overwrite", "Replace the evaluation in --output.")
    return flags


def run(given: Sequence[str]) -> None:
    flags = arguments()
    values, printed = flags.parse(given), sys.stdout
    # Who reads JSON from stdout gets nothing else.
    with redirect_stdout(sys.stderr) if values["json"] else nullcontext():
        options, scoring, tasks = build(AdapterOptions, values), build(EvalOptions, values), build(TaskOptions, values)
        if scoring.tokens == 0:
            scoring = replace(scoring, data=None)
        if scoring.data is None and not tasks.names:
            raise UsageError(
                "nothing to evaluate: name text with --data (and no --tokens 0), tasks with --tasks, or both"
            )
        # On the command line only: a file may serve evaluations with tasks and without.
        flagged = {word.partition("=")[0] for word in given}
        for name, value in () if tasks.names else (("local_data", tasks.local_data), ("limit", tasks.limit)):
            if value is not None and f"--{name}" in flagged:
                words = "is for tasks, and none is named; name some with --tasks, or leave it out"
                raise UsageError(f"--{name} {value} {words}")
        if values["fused"] and options.adapter is None:
            raise UsageError("--fused runs an adapter's routers: give --adapter, too")
        if tasks.weights != "model" and not values["fused"]:
            raise UsageError(f"--weights {tasks.weights} is for the fused operators: give --fused, too")
        options.require_found()
        scoring.require_found()
        folder = None if tasks.output is None else flags.folder(values)
        report, subject, routing, device = _evaluate(options, scoring, tasks, fused=bool(values["fused"]))
        say(json.dumps(report.to_json(), indent=2) if values["json"] else report.table(), file=printed)
        if folder is None:
            return
        with folder:
            folder.claim()
            file = _write(folder, report, subject, device)
            # Scores are there already; all processes of a model measure its routing.
            file.append(list(routing()))
            say(f"written to {folder.path}")


def _evaluate(
    options: AdapterOptions, scoring: EvalOptions, tasks: TaskOptions, *, fused: bool
) -> "tuple[EvaluationReport, str, Callable[[], Iterable[Record]], str]":
    """Return the scores, what of, what measures routing, and the device."""
    from wide.data.tokenizer import load_tokenizer
    from wide.evaluation.evaluate import evaluate
    from wide.evaluation.tasks import check_tasks
    from wide.models.adapter import read_config
    from wide.models.attach import attachment, detach, trained_on
    from wide.models.hub import find_adapter
    from wide.models.lora import merge_lora
    from wide.models.pretrained import device_name
    from wide.runs.measuring import routing_of
    from wide.runs.sources import attach_adapter, check_window, held_out_documents, load_base

    check_tasks(tasks.names, tasks.local_data)
    provenance: dict[str, Any] = {}
    if options.adapter is not None:
        # A wrong adapter must fail before the dense model has been scored for an hour.
        provenance = read_config(find_adapter(options.adapter))["provenance"]
    tokenizer = load_tokenizer(options.model)
    settings: dict[str, Any] = {"tokenizer": tokenizer, "compare_dense": False, **scoring.protocol, **tasks.protocol}
    model = load_base(options, pruned_too=options.adapter is None, parallel=tasks.parallel)
    # As much as can be told without scoring: whether it fits this model, and its thresholds the sparsity.
    attach_adapter(model, options)
    if options.adapter is not None:
        detach(model)
    documents, name = None, None
    check_window(scoring, tasks, model)
    if scoring.data is not None:
        provenance |= trained_on(model)
        documents, name = held_out_documents(
            scoring.data, scoring, text_field=tasks.text_field, tokenizer=tokenizer, provenance=provenance
        )
    # The base is scored before the adapter is attached: switching routers off would leave LoRA on.
    dense = replace(evaluate(model, documents, **settings), data=name)
    if options.adapter is None:
        return dense, _subject(model), list, device_name(model)
    attach_adapter(model, options)
    if fused and attachment(model).lora is not None:
        merge_lora(model)
    report = evaluate(model, documents, fused=fused, weights=tasks.weights, **settings)
    subject, routing = _subject(model), partial[Any](list)
    if documents is not None and attachment(model).routers():
        routing = partial(routing_of, model, tokenizer, documents, str(name), scoring, subject)
    return replace(report, data=name, dense=dense.model), subject, routing, device_name(model)


def _subject(model: Any) -> str:
    """Return what records call a model: one that was cut carries no plan any more, and LoRA read text."""
    from wide.models.attach import TRAINED_ON, attachment, is_attached, trained_on
    from wide.models.pretrained import PRUNED_PREFIX

    config = model.config
    if not is_attached(model) and not hasattr(config, TRAINED_ON) and not config.model_type.startswith(PRUNED_PREFIX):
        return "dense"
    stages = attachment(model).provenance if is_attached(model) else trained_on(model)
    return "pruned + LoRA" if any(name.endswith("recover") for name in stages) else "pruned"


def _write(folder: "RunFolder", report: "EvaluationReport", subject: str, device: str) -> "RecordFile":
    from wide.records import Record
    from wide.runs.measuring import evaluation_records

    if is_main_process():
        report.save(folder.path / "evaluation.json")
    file, data = folder.new_records(device=device), report.data or ""
    if report.dense is not None:
        file.append(evaluation_records("dense", report.dense, None, data))
    file.append(evaluation_records(subject, report.model, report.sparsity, data))
    for metric, value in (("routing.flip_rate", report.flip_rate), ("accuracy.retention", report.retention)):
        if value is not None:
            file.append([Record(subject=subject, metric=metric, value=value, unit="share")])
    return file
