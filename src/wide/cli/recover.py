"""`wide recover`: stage 2 on top of a saved adapter; evaluation, adapter, records, report."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from wide.cli.arguments import Arguments
from wide.config import ObjectiveConfig, RecoverConfig, recorded_objective
from wide.errors import AdapterError, UsageError
from wide.runs.process import stoppable
from wide.runs.settings import EvalOptions, LoraOptions, RunOptions, RunRequest, SampleOptions, build
from wide.schema import typed


@dataclass(frozen=True, kw_only=True, slots=True)
class RecoverOptions:
    """Where stage 2 begins.

    Args:
        adapter: Folder of the adapter of stage 1, or of the run that made it.
        sparsity: Share to skip, counted as in stage 1; null keeps that of stage 1. Not for an adapter without routers.
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
    flags.add_fields(RecoverConfig, prefix="recover")
    flags.add_fields(LoraOptions, prefix="recover", only=("dense_baseline",))
    flags.add_fields(EvalOptions, prefix="eval")
    flags.add_fields(SampleOptions, prefix="sample")
    return flags


def run(given: Sequence[str]) -> None:
    flags = arguments()
    values = flags.parse(given)
    start, options = build(RecoverOptions, values), build(RunOptions, values)
    scoring, stage = build(EvalOptions, values, group="eval"), build(RecoverConfig, values, group="recover")
    options.require_found()
    scoring.require_found()
    folder = flags.folder(values)
    asked = RunRequest(
        run=options,
        objective=objective_after(start.adapter, start.sparsity, trains_routers=stage.train_routers),
        recover=stage,
        dense_baseline=values["recover"]["dense_baseline"],
        scoring=scoring,
        sample=build(SampleOptions, values, group="sample"),
    )
    from wide.runs.run import Run

    with stoppable(folder.kept), folder:
        Run(asked, folder, command=["wide", "recover", *given], dry_run=values["dry_run"]).recover(start.adapter)


def objective_after(name: str, sparsity: float | None, *, trains_routers: bool) -> ObjectiveConfig:
    """Return what stage 2 minimises after an adapter: what stage 1 minimised, toward another sparsity if one is given.

    Frozen routers are not steered. Without routers there is nothing to steer, and LoRA alone is trained.
    """
    from wide.models.adapter import read_config
    from wide.models.hub import find_adapter

    folder = find_adapter(name)
    config = read_config(folder)
    if not config["plan"].is_routed:
        if sparsity:
            raise UsageError(
                f"--sparsity {sparsity} steers routers, and {folder} has none: what it prunes stays pruned, and LoRA "
                "alone is trained; leave it out"
            )
        return ObjectiveConfig(sparsity=0.0, weight=0.0)
    where = f"{folder}: provenance.prune.objective"
    found = typed(dict[str, Any], config["provenance"].get("prune", {}).get("objective", {}), where)
    if "sparsity" not in found and sparsity is None:
        raise AdapterError(f"{folder} does not say to which sparsity it was trained; give --sparsity")
    if not trains_routers and sparsity not in (None, found.get("sparsity", sparsity)):
        raise UsageError(
            f"--sparsity {sparsity} steers routers, and --recover.train_routers false freezes them; leave one out"
        )
    objective: ObjectiveConfig = typed(ObjectiveConfig, asdict(ObjectiveConfig()) | recorded_objective(found), where)
    return objective if sparsity is None else replace(objective, sparsity=sparsity)
