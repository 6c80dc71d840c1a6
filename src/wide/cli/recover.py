"""`wide recover`: stage 2 on top of a saved adapter; evaluation, adapter, records, report."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from wide.cli.arguments import Arguments, add_run_switches, build, resolved
from wide.cli.options import EvalOptions, RunOptions, SampleOptions
from wide.cli.termination import telling
from wide.config import ObjectiveConfig, RecoverConfig
from wide.errors import ConfigError


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
    """Return the flags of the command."""
    flags = Arguments("recover", "Train LoRA and routers of an adapter (stage 2).")
    flags.add_fields(RunOptions)
    flags.add_fields(RecoverOptions)
    add_run_switches(flags)
    flags.add_fields(ObjectiveConfig, prefix="objective", skip=("sparsity",), otherwise="as in stage 1")
    flags.add_fields(RecoverConfig, prefix="recover")
    flags.add_fields(EvalOptions, prefix="eval", skip=("untrained",))
    flags.add_fields(SampleOptions, prefix="sample")
    return flags


def _refuse_own_adapter(adapter: str, output: str) -> None:
    # --overwrite would delete the adapter that is still to be read.
    if Path(adapter).resolve().is_relative_to(Path(output).resolve()):
        raise ConfigError(f"--output {output} holds the adapter that is to be recovered; choose another folder")


def run(given: Sequence[str]) -> None:
    """Carry out the command.

    Raises:
        ConfigError: If the output folder holds the adapter itself.
        UsageError: If the adapter has no routers, and a flag is to steer them.
    """
    flags = arguments()
    values = flags.parse(given)
    options, start = build(RunOptions, values), build(RecoverOptions, values)
    stage, scoring = build(RecoverConfig, values, group="recover"), build(EvalOptions, values, group="eval")
    sample = build(SampleOptions, values, group="sample")
    from wide.cli.loading import objective_after
    from wide.cli.pipeline import Pipeline
    from wide.cli.run_folder import RunFolder

    _refuse_own_adapter(start.adapter, options.output)
    objective = objective_after(start.adapter, {**values["objective"], "sparsity": start.sparsity})
    told = asdict(objective)
    config = resolved(values) | {"sparsity": told.pop("sparsity"), "objective": told}
    # The objective's flags are null by default, which only says that stage 1 decides.
    defaults = flags.defaults() | {"objective": asdict(ObjectiveConfig())}
    folder = RunFolder(
        options.output, config, resume=values["resume"], overwrite=values["overwrite"], defaults=defaults
    )
    pipeline = Pipeline(options, scoring, sample, folder, command=["wide", "recover", *given])
    with telling(folder.kept):
        pipeline.recover(start.adapter, objective, stage)
