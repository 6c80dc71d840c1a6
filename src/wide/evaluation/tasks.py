"""The tasks of the paper's tables: their metrics, their sizes, and their files on disk."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from wide.data.documents import read_json_lines
from wide.data.local_names import unreachable
from wide.errors import EvaluationError, MissingExtraError

Row = dict[str, Any]
ELSEWHERE = "; or name a folder with copies with --local_data (in Python, local_data=)"
PER_WORD = "word_perplexity"
"""The metric of the one task that is no choice between options."""


@dataclass(frozen=True, slots=True)
class Task:
    """One task of lm-evaluation-harness, as the paper reports it.

    Args:
        stock: The harness's own definition, relative to its folder of tasks.
        num_items: Items of the full evaluation split; a run over fewer is a subset and is labelled so.
        files: How the names of a local copy may begin, as glob patterns, best first.
        convert: Turns a row of another common layout into those fields.
    """

    name: str
    metric: str
    stock: str
    num_items: int
    files: tuple[str, ...]
    fields: tuple[str, ...]
    convert: Callable[[Row], Row] = dict


def _boolq_row(row: Row) -> Row:
    # The original data set has a boolean `answer` where SuperGLUE has an integer `label`.
    return row if "label" in row or "answer" not in row else {**row, "label": int(row["answer"])}


_ANSWER, _OPENBOOKQA = ("question", "choices", "answerKey"), ("question_stem", "choices", "answerKey")
_BOOLQ, _WINOGRANDE = ("passage", "question", "label"), ("sentence", "option1", "option2", "answer")
_ALL = (
    Task("wikitext", PER_WORD, "wikitext/wikitext.yaml", 62, ("wikitext*.test", "test.pages"), ("page",)),
    Task("arc_easy", "acc_norm", "arc/arc_easy.yaml", 2376, ("arc_easy.test",), _ANSWER),
    Task("arc_challenge", "acc_norm", "arc/arc_challenge.yaml", 1172, ("arc_challenge.test",), _ANSWER),
    Task("boolq", "acc", "super_glue/boolq/default.yaml", 3270, ("boolq.validation",), _BOOLQ, convert=_boolq_row),
    Task("winogrande", "acc", "winogrande/default.yaml", 1267, ("winogrande*.validation",), _WINOGRANDE),
    Task("piqa", "acc_norm", "piqa/piqa.yaml", 1838, ("piqa.validation",), ("goal", "sol1", "sol2", "label")),
    Task("openbookqa", "acc_norm", "openbookqa/openbookqa.yaml", 500, ("openbookqa.test",), _OPENBOOKQA),
    Task(
        *("hellaswag", "acc_norm", "hellaswag/hellaswag.yaml", 10042, ("hellaswag.validation",)),
        fields=("activity_label", "ctx_a", "ctx_b", "endings", "label"),
        # The original files join the two halves of the context; the stock prompt joins them again.
        convert=lambda row: row if "ctx_a" in row or "ctx" not in row else {**row, "ctx_a": row["ctx"], "ctx_b": ""},
    ),
)
TASKS: Mapping[str, Task] = {task.name: task for task in _ALL}
ZERO_SHOT_TASKS = tuple(task.name for task in _ALL if task.name != "wikitext")
"""The seven tasks whose accuracies the paper averages."""


def find_task(name: str) -> Task:
    """Return a task by name; EvaluationError says which there are."""
    if name not in TASKS:
        raise EvaluationError(f"there is no task {name!r}; tasks: {', '.join(TASKS)}")
    return TASKS[name]


def check_tasks(names: Sequence[str], local_data: str | Path | None) -> None:
    """Refuse tasks that cannot be scored here, before anything that takes long.

    Raises EvaluationError if there is no such task, or neither the hub nor its cache gives the data; MissingExtraError
    if lm-evaluation-harness is not installed.
    """
    tasks = [find_task(name) for name in names]
    harness = getattr(find_spec("lm_eval"), "origin", None)
    if tasks and harness is None:
        raise MissingExtraError("task evaluation needs lm-evaluation-harness: pip install 'wide[eval]'")
    for task in tasks:
        if local_data is not None:
            _local_file(task, Path(local_data))
            continue
        wrong = unreachable(_data_set(Path(str(harness)).parent / "tasks" / task.stock), "dataset")
        if wrong is not None:
            raise EvaluationError(f"the data of the task {task.name!r} cannot be loaded: {wrong}{ELSEWHERE}")


def _data_set(definition: Path) -> str:
    # The harness's tags are not those of plain YAML.
    facts = dict(re.findall(r"^(dataset_path|include): *(\S+)", definition.read_text(encoding="utf-8"), re.MULTILINE))
    return facts["dataset_path"] if "dataset_path" in facts else _data_set(definition.parent / facts["include"])


def write_local_task(task: Task, local_data: Path, stock_tasks: Path, folder: Path) -> str:
    """Write a task definition that reads a local copy of the data, and return its name for the harness.

    Prompts and metrics stay the harness's own. Raises EvaluationError if there is no such file, or its rows lack a
    field. The copy lies in `local_data` or in a folder directly below; what is written goes to `folder`.
    """
    rows = _local_rows(task, _local_file(task, local_data))
    data = folder / f"{task.name}.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    name = f"{task.name}_local"
    files = {split: str(data) for split in ("train", "validation", "test")}
    # JSON is YAML, and quotes every path correctly.
    definition: Row = {
        "include": str(stock_tasks / task.stock),
        "task": name,
        "tag": [],
        "dataset_path": "json",
        "dataset_name": None,
        "dataset_kwargs": {"data_files": files, "cache_dir": str(folder / "cache")},
    }
    (folder / f"{name}.yaml").write_text(json.dumps(definition))
    return name


def _local_file(task: Task, local_data: Path) -> Path:
    patterns = [f"{name}*.jsonl*" for name in task.files]
    for pattern in patterns:
        found = sorted([*local_data.glob(pattern), *local_data.glob(f"*/{pattern}")])
        if found:
            return found[0]
    raise EvaluationError(
        f"{local_data} has no file for the task {task.name!r}; wanted {' or '.join(patterns)}, there or in a folder "
        "directly below; leave out --local_data to load the task from the Hugging Face hub"
    )


def _local_rows(task: Task, path: Path) -> list[Row]:
    rows = []
    for number, value in read_json_lines(path):
        row = task.convert(value) if isinstance(value, dict) else {}
        missing = [field for field in task.fields if field not in row]
        if missing:
            raise EvaluationError(
                f"{path}, line {number}: the task {task.name!r} needs the fields {list(task.fields)}, and {missing} "
                f"are missing; fields seen: {sorted(row)}"
            )
        # Other fields are left out: rows that differ in them would not load as one table.
        rows.append({field: row[field] for field in task.fields})
    if not rows:
        raise EvaluationError(f"{path} holds no items for the task {task.name!r}; fetch it again")
    return rows
