"""`wide compare`: a grid of methods, sparsities and seeds on one model and one text, as one table."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import yaml

from wide.cli.arguments import Arguments, load_yaml, look_ahead
from wide.comparison.grid import DENSE, OBJECTIVE, GridOptions, request
from wide.config import ObjectiveConfig, RecoverConfig, StageConfig
from wide.errors import UsageError
from wide.methods.catalogue import names
from wide.runs.process import num_processes, say
from wide.runs.settings import EvalOptions, LoraOptions, RunOptions, ScoredTasks


def arguments(methods: Sequence[str] = (), only_in_files: Collection[str] = ()) -> Arguments:
    """Return the flags; files may also have settings of `only_in_files`, to serve many comparisons."""
    flags = Arguments(
        "compare",
        "Run a grid of methods, sparsities and seeds, and print one table.",
        usage="--model M --data D --methods A,B --output GRID [FLAGS]",
        first=("config", "model", "data", "methods", "sparsities", "recover.steps", "output"),
    )
    flags.add_fields(RunOptions, skip=("report", "tensorboard", "tracker", "parallel"))
    flags.add_fields(GridOptions)
    flags.add_run_switches()
    flags.add_methods(methods, asked_by=f"--methods {','.join(methods)}", only_in_files=only_in_files)
    flags.add_fields(StageConfig, prefix="train", skip=("seed",))
    flags.add_fields(ObjectiveConfig, prefix="objective", only=OBJECTIVE)
    flags.add_fields(LoraOptions, prefix="recover", only=("steps",))
    flags.add_fields(RecoverConfig, prefix="recover", skip=("steps", "seed"))
    flags.add_fields(EvalOptions, prefix="eval")
    flags.add_fields(ScoredTasks, prefix="eval")
    reason = "is a flag of wide prune; a comparison always writes its tables and its page"
    flags.refuse(["report", "tensorboard", "tracker"], reason)
    flags.refuse(["train.seed", "recover.seed"], "is not for this command: --seeds are those of every stage")
    return flags


def run(given: Sequence[str]) -> None:
    ahead = look_ahead(given)
    rows = str(ahead.get("methods") or "")
    needed = GridOptions(methods=rows, variants=_variants(ahead.get("variants"))).methods_needed if rows else []
    methods = [name for name in needed if name != DENSE]
    # The saved configuration has underscores for dashes.
    keys = {key.replace("-", "_") for key in ahead}
    flags = arguments(methods, {name for name in names() if name.replace("-", "_") in keys})
    values = flags.parse(given)
    asked = request(values)
    if num_processes() > 1:
        raise UsageError(
            "a comparison does not run under torchrun; start as many processes as you like with --shard next"
        )
    if asked.grid.shard is not None and values["overwrite"]:
        raise UsageError("--overwrite would delete the cells of the other processes; remove the folder instead")
    unused = [name for name in asked.grid.variants or {} if name not in asked.grid.method_names]
    if unused:
        say(f"warning  variants that --methods does not name are left out: {', '.join(unused)}")
    # Nothing heavier than the schema is imported until the command line is known to be right.
    asked.run.require_found()
    asked.scoring.require_found()
    from wide.comparison.run import ComparisonRun

    command = ["wide", "compare", *given]
    ComparisonRun(asked, flags.folder(values), command=command, debug=bool(values["debug"])).run()


def _variants(given: Any) -> dict[str, Any]:
    try:
        given = load_yaml(given) if isinstance(given, str) else given
    except yaml.YAMLError as error:
        raise UsageError(f"--variants cannot be read as YAML: {' '.join(str(error).split())}") from error
    if given is not None and not isinstance(given, Mapping):
        raise UsageError(f"variants must be a mapping, got {given!r}")
    return {str(name): entry for name, entry in (given or {}).items()}
