"""`wide profile`: time a whole model on a GPU by public calls, pruned and dense."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from wide.cli.arguments import Arguments
from wide.cli.measuring import noted, require_gpu
from wide.data.corpus import require_found
from wide.errors import DataError, EvaluationError, UsageError
from wide.models.hub import ADAPTER, find_adapter
from wide.profiling.options import ProfileOptions
from wide.records import CELLS
from wide.runs.process import say
from wide.runs.settings import build

PROFILE = "profile"
"""Folder of a run or a cell that holds its speed."""


def arguments() -> Arguments:
    flags = Arguments(
        "profile",
        "Time a model by the calls that users make: a forward, the first and each further token of generate() (TTFT, "
        "TPOT), and generate_batch. The dense model is timed, too: as loaded, and in the same engine.",
        usage="--model M --adapter RUN --output RUN/profile [FLAGS]",
        first=("model", "adapter", "prompt", "generate", "batched", "output"),
    )
    flags.add_fields(ProfileOptions)
    return flags


def run(given: Sequence[str]) -> None:
    options = build(ProfileOptions, arguments().parse(given))
    _check(options)
    cells = [] if options.comparison is None else _cells(Path(options.comparison))
    require_gpu("profile")
    if options.comparison is not None:
        _time_cells(options, cells, given)
        return
    if options.adapter is not None:
        options = replace(options, adapter=str(find_adapter(options.adapter)))
    if not _profile(options, Path(str(options.output)), given):
        raise EvaluationError("what was to be timed does not compute what the model computes; see the gate above")


def _profile(options: ProfileOptions, out: Path, words: Sequence[str]) -> bool:
    import torch

    from wide.profiling.profile import run_profile

    with noted(out, "profile", words):
        return run_profile(options, out, device=torch.device("cuda", torch.cuda.current_device()), say=say)


def _check(options: ProfileOptions) -> None:
    if options.shape is not None:
        from wide.profiling.synthetic import SHAPES

        if options.shape not in SHAPES:
            raise UsageError(f"unknown shape {options.shape!r}; choose one of {', '.join(sorted(SHAPES))}, or --model")
    for name in ("shape", "layers"):
        value = getattr(options, name)
        if value is not None and options.model is not None:
            raise UsageError(
                f"the model says how large it is, and all of it is timed; leave out --{name} (got {value}; null where "
                "a file names it), or --model"
            )
    if options.ffn_group_size is not None and (options.adapter or options.comparison) is not None:
        raise UsageError(
            f"the adapter{'' if options.adapter else ' of each cell'} says how large its groups are; leave out "
            f"--ffn_group_size (got {options.ffn_group_size}; null where a file names it)"
        )
    for name in ("adapter", "comparison", "text"):
        if getattr(options, name) is not None and options.model is None:
            raise UsageError(f"--{name} needs its base: give --model, too")
    if options.text is not None:
        require_found(options.text)
    if options.comparison is None:
        if options.output is None:
            raise UsageError("--output is missing: name the folder for endtoend.json")
        return
    for name in ("output", "adapter"):
        if getattr(options, name) is not None:
            raise UsageError(f"--{name} does not go with --comparison, whose cells say what is timed and keep it")
    if options.batched is not None:
        raise UsageError("--batched is for one model; leave it out with --comparison")


def _cells(comparison: Path) -> list[Path]:
    """Return the folders of a comparison's cells that kept an adapter; the dense model is every cell's peer."""
    found = sorted(path.parent for path in (comparison / CELLS).glob(f"*/{ADAPTER}"))
    cells = [cell for cell in found if not cell.name.startswith("dense-")]
    if not cells:
        raise DataError(
            f"{comparison} holds no cells with adapters; name the --output of a wide compare that kept them "
            "(--keep_adapters true)"
        )
    return cells


def _time_cells(options: ProfileOptions, cells: Sequence[Path], words: Sequence[str]) -> None:
    """Time one cell after the other; what goes wrong with one costs no other."""
    failed = []
    for number, cell in enumerate(cells, 1):
        out = cell / PROFILE
        is_timed = _is_timed(out)
        say(f"[{number}/{len(cells)}] {cell.name}{': timed before' if is_timed else ''}")
        try:
            if not is_timed and not _profile(replace(options, adapter=str(cell / ADAPTER)), out, words):
                failed.append(f"{cell.name} does not compute what the model computes")
        # Kernels that do not fit a shape have errors of their own kinds.
        except Exception as error:
            say(f"{type(error).__name__}: {error}")
            failed.append(f"{cell.name}: {type(error).__name__}")
    if failed:
        raise EvaluationError(f"{len(failed)} of {len(cells)} cells could not be timed: {'; '.join(failed)}")


def _is_timed(out: Path) -> bool:
    try:
        # This comes last; a file that was cut while it was written is measured again.
        return "finished" in json.loads((out / "endtoend.json").read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return False
