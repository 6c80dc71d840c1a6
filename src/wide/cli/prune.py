"""`wide prune`: stage 1, and stage 2 if asked; evaluation, adapter, records, report."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from wide.cli.arguments import Arguments, add_run_switches, build, resolved
from wide.cli.options import EvalOptions, PruneRequest, RunOptions, SampleOptions
from wide.cli.usage import UsageError
from wide.config import ObjectiveConfig, RecoverConfig, StageConfig, WideConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class RecoverSwitch:
    """Stage 2: LoRA and routers.

    Args:
        steps: Optimiser steps of stage 2; 0 leaves stage 2 out.
    """

    steps: int = 0


def arguments() -> Arguments:
    """Return the flags of the command."""
    flags = Arguments("prune", "Train routers to a sparsity (stage 1) and, with --recover.steps, LoRA (stage 2).")
    flags.add_fields(RunOptions)
    flags.add_fields(ObjectiveConfig, only=("sparsity",))
    flags.add_fields(WideConfig)
    add_run_switches(flags)
    flags.add_fields(ObjectiveConfig, prefix="objective", skip=("sparsity",))
    flags.add_fields(StageConfig, prefix="train")
    flags.add_fields(RecoverSwitch, prefix="recover")
    flags.add_fields(RecoverConfig, prefix="recover", skip=("steps",))
    flags.add_fields(EvalOptions, prefix="eval")
    flags.add_fields(SampleOptions, prefix="sample")
    return flags


def request(values: Mapping[str, Any]) -> PruneRequest:
    """Return the run that parsed values describe.

    Raises:
        UsageError: If the number of steps of stage 2 is negative.
        ConfigError: If a value is out of its range.
    """
    if values["recover"]["steps"] < 0:
        raise UsageError(f"recover.steps must not be negative, got {values['recover']['steps']}; 0 leaves stage 2 out")
    return PruneRequest(
        run=build(RunOptions, values),
        config=build(WideConfig, values),
        objective=build(ObjectiveConfig, values["objective"], sparsity=values["sparsity"]),
        stage=build(StageConfig, values["train"]),
        recover=build(RecoverConfig, values["recover"]) if values["recover"]["steps"] else None,
        scoring=build(EvalOptions, values["eval"]),
        sample=build(SampleOptions, values["sample"]),
    )


def run(given: Sequence[str]) -> None:
    """Carry out the command."""
    values = arguments().parse(given)
    asked = request(values)
    # Nothing heavier than the schema is imported until the command line is known to be right.
    from wide.cli.pipeline import Pipeline
    from wide.cli.run_folder import RunFolder

    config = resolved(values)
    folder = RunFolder(asked.run.output, config, resume=values["resume"], overwrite=values["overwrite"])
    Pipeline(asked.run, asked.scoring, asked.sample, folder, command=["wide", "prune", *given]).prune(
        asked.config, asked.objective, asked.stage, asked.recover
    )
