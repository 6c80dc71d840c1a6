"""`wide prune`: any method of the benchmark, and LoRA if asked; evaluation, adapter, records, report.

Without `--method` it is the paper's: routers are trained (stage 1), and LoRA with them (stage 2).
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from wide.cli.arguments import Arguments, look_ahead
from wide.comparison.grid import OBJECTIVE
from wide.config import ObjectiveConfig, RecoverConfig, StageConfig, WideConfig
from wide.errors import ConfigError, UsageError
from wide.methods.catalogue import Match, WideMethodConfig, get, names
from wide.runs.process import stoppable
from wide.runs.settings import EvalOptions, LoraOptions, PruneRequest, RunOptions, SampleOptions, build

_DEFAULT = "wide"
# What a method that trains nothing takes of stage 1: how its calibration text is packed, and the seed.
_TEXT = ("sequence_length", "seed")


@dataclass(frozen=True, kw_only=True, slots=True)
class MethodOptions:
    """What decides.

    Args:
        method: A method of the benchmark (wide methods lists them).
        match: What the sparsity counts: 'nominal' as the method's paper does, 'linear_flops' the matrix-product work
            of all decoder layers, keys and values included, the output head not.
    """

    method: str = _DEFAULT
    match: Match = "nominal"


def arguments(method: str = _DEFAULT, in_files: Collection[str] = ()) -> Arguments:
    """Return the flags of a method; others' are refused, but files may have settings of the methods `in_files`."""
    flags = Arguments(
        "prune",
        "Prune a model: train routers to a sparsity (stage 1), then LoRA with them (stage 2, with --recover.steps). "
        "The recipe fitted-50 is a good start; without a recipe every default is the paper's, 10,000 steps.",
        usage="--config fitted-50 --model M --data D --output RUN [FLAGS]",
        first=("config", "model", "data", "sparsity", "recover.steps", "output", "dry_run"),
    )
    flags.add_fields(RunOptions)
    flags.add_fields(ObjectiveConfig, only=("sparsity",))
    flags.add_fields(MethodOptions)
    flags.add_run_switches()
    flags.add_switch("dry_run", "Check everything, say what the run costs here, and write nothing.")
    _add_settings(flags, method, {key.replace("_", "-") for key in in_files})
    flags.add_fields(LoraOptions, prefix="recover")
    flags.add_fields(RecoverConfig, prefix="recover", skip=("steps",))
    flags.add_fields(EvalOptions, prefix="eval")
    flags.add_fields(SampleOptions, prefix="sample")
    return flags


def _add_settings(flags: Arguments, method: str, in_files: Collection[str]) -> None:
    asked_by = f"--method {method}"
    trains, everyday = get(method).trains, [field.name for field in fields(WideConfig)]
    others = {name for name in names() if name in in_files} - {method, _DEFAULT}
    if method == _DEFAULT:
        flags.add_fields(WideConfig)
        flags.add_fields(ObjectiveConfig, prefix="objective", skip=("sparsity",))
        # The settings of this method are the everyday flags.
        flags.add_methods((), asked_by=asked_by, only_in_files=others)
        flags.refuse([_DEFAULT], "is not for this command: method wide has its flags without a prefix here")
    else:
        reason = f"is a flag of method wide, and the command runs {asked_by}"
        flags.refuse(everyday, reason, even_known=True)
        flags.add_fields(WideConfig, only=[name for name in everyday if name.replace("_", "-") in in_files] or ("",))
        flags.add_methods((method,), asked_by=asked_by, only_in_files=others)
    if not trains:
        trained = ", ".join(name for name in names() if get(name).trains)
        reason = f"is for methods that train routers ({trained}), not for {method}"
        later = [f"train.{field.name}" for field in fields(StageConfig) if field.name not in _TEXT]
        flags.refuse(["train", "objective", *later], reason)
        flags.refuse(later, reason, even_known=True)
    flags.add_fields(StageConfig, prefix="train", only=() if trains or "train" in in_files else _TEXT)
    if trains and method != _DEFAULT:
        flags.add_fields(ObjectiveConfig, prefix="objective", only=OBJECTIVE)
        reason = f"is a flag of method wide; {method} takes --match"
        flags.refuse(["objective.target"], reason)


def request(values: Mapping[str, Any]) -> PruneRequest:
    """Return the run that parsed values describe, or refuse values that contradict each other."""
    if values["sparsity"] == 0:
        raise UsageError(
            "--sparsity 0 leaves nothing to prune; name the share to skip, like 0.5 (wide eval --sparsity 0 runs "
            "everything of a trained adapter)"
        )
    method, match = values["method"], values["match"]
    if values["tracker"] is not None and (method, match) != (_DEFAULT, "nominal"):
        raise UsageError(
            f"--tracker keeps the curves of --method {_DEFAULT} --match nominal only, and the command runs --method "
            f"{method} --match {match}; leave it out"
        )
    objective = build(ObjectiveConfig, values, group="objective", sparsity=values["sparsity"])
    lora = build(LoraOptions, values, group="recover")
    return PruneRequest(
        run=build(RunOptions, values),
        recover=build(RecoverConfig, values, group="recover") if lora.steps else None,
        dense_baseline=lora.dense_baseline,
        scoring=build(EvalOptions, values, group="eval"),
        sample=build(SampleOptions, values, group="sample"),
        method=method,
        match=match,
        settings=_settings(values, objective),
        objective=objective,
        stage=build(StageConfig, values, group="train"),
    )


def _settings(values: Mapping[str, Any], objective: ObjectiveConfig) -> Any:
    if values["method"] != _DEFAULT:
        return build(get(values["method"]).settings, values, group=values["method"])
    if values["match"] == "nominal":
        return build(WideConfig, values)
    if objective.target == "linear_flops":
        raise ConfigError(
            "match=linear_flops says itself what is counted: leave objective.target at 'mean' or 'uniform'"
        )
    return build(WideMethodConfig, values, uniform=objective.target == "uniform")


def run(given: Sequence[str]) -> None:
    ahead = look_ahead(given)
    flags = arguments(get(str(ahead.get("method") or _DEFAULT)).name, ahead.keys())
    values = flags.parse(given)
    asked = request(values)
    # Nothing heavier than the schema is imported until the command line is known to be right.
    asked.run.require_found()
    asked.scoring.require_found()
    from wide.runs.run import Run

    folder = flags.folder(values)
    with stoppable(folder.kept), folder:
        Run(asked, folder, command=["wide", "prune", *given], dry_run=values["dry_run"]).prune()
