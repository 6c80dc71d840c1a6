"""`wide recover`: stage 2 on top of a saved adapter; evaluation, adapter, records, report."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from wide.cli.arguments import Arguments
from wide.config import ObjectiveConfig, RecoverConfig
from wide.errors import AdapterError, ConfigError, UsageError
from wide.runs.process import stoppable
from wide.runs.settings import EvalOptions, LoraOptions, RunOptions, RunRequest, SampleOptions, build, flags_named
from wide.schema import typed


@dataclass(frozen=True, kw_only=True, slots=True)
class RecoverOptions:
    """Where stage 2 begins.

    Args:
        adapter: Folder of the adapter of stage 1, or of the run that made it.
        sparsity: Share of work to skip, in the measure named by objective.target; null keeps that of stage 1.
            Not for an adapter without routers.
    """

    adapter: str
    sparsity: float | None = None


def arguments() -> Arguments:
    flags = Arguments(
        "recover",
        "Train LoRA and routers of an adapter (stage 2).",
        usage="--model M --adapter RUN --data D --output RUN2 [FLAGS]",
        first=("config", "model", "adapter", "data", "recover.steps", "output", "dry_run"),
    )
    flags.add_fields(RunOptions)
    flags.add_fields(RecoverOptions)
    flags.add_run_switches()
    flags.add_switch("dry_run", "Check everything, say what the run costs here, and write nothing.")
    flags.add_fields(ObjectiveConfig, prefix="objective", skip=("sparsity",), otherwise="as in stage 1")
    flags.add_fields(RecoverConfig, prefix="recover")
    flags.add_fields(LoraOptions, prefix="recover", only=("dense_baseline",))
    flags.add_fields(EvalOptions, prefix="eval")
    flags.add_fields(SampleOptions, prefix="sample")
    return flags


def run(given: Sequence[str]) -> None:
    flags = arguments()
    values = flags.parse(given)
    start, options = build(RecoverOptions, values), build(RunOptions, values)
    scoring = build(EvalOptions, values, group="eval")
    options.require_found()
    scoring.require_found()
    if Path(start.adapter).resolve().is_relative_to(Path(options.output).resolve()):
        # --overwrite would delete the adapter that is still to be read.
        raise ConfigError(f"--output {options.output} holds the adapter that is to be recovered; choose another folder")
    objective = objective_after(start.adapter, {**values["objective"], "sparsity": start.sparsity})
    asked = RunRequest(
        run=options,
        objective=objective,
        recover=build(RecoverConfig, values, group="recover"),
        dense_baseline=values["recover"]["dense_baseline"],
        scoring=scoring,
        sample=build(SampleOptions, values, group="sample"),
    )
    from wide.runs.run import Run

    told = asdict(objective)
    values |= {"sparsity": told.pop("sparsity"), "objective": told}
    # The objective's flags are null by default, which only says that stage 1 decides.
    folder = flags.folder(values, objective=asdict(ObjectiveConfig()))
    with stoppable(folder.kept), folder:
        Run(asked, folder, command=["wide", "recover", *given], dry_run=values["dry_run"]).recover(start.adapter)


def objective_after(name: str, changes: Mapping[str, Any]) -> ObjectiveConfig:
    """Return what stage 2 minimises after an adapter: what the adapter was trained to, with changes by field.

    Without routers there is nothing to steer: the LM loss alone, or distillation.
    """
    from wide.models.adapter import read_config
    from wide.runs.sources import find_adapter

    folder = find_adapter(name)
    config = read_config(folder)
    given = {key: value for key, value in changes.items() if value is not None}
    if not config["plan"].is_routed:
        return _objective_without_routers(folder, given)
    where = f"{folder}: provenance.prune.objective"
    found = typed(dict[str, Any], config["provenance"].get("prune", {}).get("objective", {}), where)
    if "sparsity" not in found and "sparsity" not in given:
        raise AdapterError(f"{folder} does not say to which sparsity it was trained; give --sparsity")
    with flags_named("objective", of=given, not_of=("sparsity",)):
        stage_1: ObjectiveConfig = typed(ObjectiveConfig, asdict(ObjectiveConfig()) | found, where)
        return replace(stage_1, **given)


def _objective_without_routers(folder: Path, given: Mapping[str, Any]) -> ObjectiveConfig:
    objective = ObjectiveConfig(sparsity=0.0, weight=0.0, distillation=given.get("distillation", 0.0))
    for key, value in given.items():
        # The saved configuration of such a run says the same and can be fed back.
        if value != getattr(objective, key):
            flag = key if key == "sparsity" else f"objective.{key}"
            raise UsageError(
                f"--{flag} {value} steers routers, and {folder} has none: what it prunes stays pruned, and LoRA alone "
                "is trained; leave it out"
            )
    return objective
