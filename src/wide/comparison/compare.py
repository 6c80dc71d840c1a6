"""`wide.compare`: a comparison from Python."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from wide.comparison.grid import DENSE, OBJECTIVE, GridOptions, method_settings, request
from wide.comparison.run import ComparisonRun
from wide.config import ObjectiveConfig, RecoverConfig, StageConfig
from wide.methods.catalogue import Match
from wide.report.comparison import read_comparison
from wide.report.comparison_tables import lines, to_text
from wide.runs.folder import RunFolder
from wide.runs.settings import EvalOptions, RunOptions, ScoredTasks
from wide.schema import require


@dataclass(frozen=True, kw_only=True, slots=True)
class ComparisonResult:
    """What `wide.compare` found.

    Args:
        rows: One entry for each row and sparsity, the dense model first, as `table.csv` has them; `pandas.DataFrame`
            takes them. Figures are means over seeds, None where nothing was measured.
        table: The tables as text, for a terminal.
    """

    folder: Path
    rows: tuple[Mapping[str, Any], ...]
    table: str


def compare(
    model: str | Path,
    data: str | Path,
    methods: Sequence[str],
    *,
    output: str | Path,
    sparsities: Sequence[float] = (0.25, 0.5),
    seeds: Sequence[int] = (17,),
    match: Match = "nominal",
    settings: Mapping[str, Mapping[str, Any]] | None = None,
    variants: Mapping[str, Mapping[str, Any]] | None = None,
    stage: StageConfig | None = None,
    objective: ObjectiveConfig | None = None,
    recover: RecoverConfig | None = None,
    budget: Literal["original", "equal"] = "original",
    held_out: str | Path | None = None,
    tokens: int | None = 65_536,
    window: int = 1024,
    batch_size: int = 4,
    tasks: Sequence[str] = (),
    local_data: str | Path | None = None,
    limit: int | None = None,
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto",
    device: str = "auto",
    shard: Literal["next"] | None = None,
    keep_adapters: bool = True,
    resume: bool = False,
    overwrite: bool = False,
) -> ComparisonResult:
    """Run a grid of methods, sparsities and seeds on one model and one text, and return its table.

    It does what `wide compare` does: every cell is pruned, gets LoRA if `recover` is given, and is scored on held-out
    text and tasks; so is the dense model with the same LoRA. `output` gets each cell, with records, tables and a page.
    The command can continue what this function began, and the other way round.

    Args:
        model: Hub name or local folder of a Hugging Face causal LM.
        data: Text that methods read and train on: any source of `load_documents`.
        methods: Names of methods and variants; 'dense' is always there.
        sparsities: Shares to prune, in (0, 1).
        seeds: Seeds of calibration and training; with several, figures are means over them.
        match: What the sparsities count: 'nominal' as each method's paper does, 'linear_flops' the matrix-product work
            of all decoder layers.
        settings: By method, the settings that differ from its original's, e.g. {'wide': {'ffn_group_size': 32}}.
        variants: Further rows by name: {'wide-g64': {'method': 'wide', 'ffn_group_size': 64}}.
        stage: Training of methods that train routers; its sequence length packs the text of all methods.
        objective: Loss of methods that train routers; only weight, distillation and smoothing count.
        recover: LoRA for all rows; None leaves it out.
        budget: 'original' reads the text that each method's settings say, 'equal' as many tokens for every method.
        held_out: Text to score; None means the documents of `data` that are held out.
        tokens: Tokens of it to score; 0 scores tasks alone, None all.
        tasks: Tasks of lm-evaluation-harness, e.g. ('piqa', 'wikitext').
        local_data: Folder with copies of the tasks' data; None loads them from the Hugging Face hub.
        device: 'auto' is the GPU where there is one, else the CPU.
        shard: How processes share the grid: 'next' takes the next free cell; None runs all.
        keep_adapters: Whether adapters and checkpoints of finished cells stay.

    Returns:
        The rows with their figures, the tables as text, and the folder.

    Raises:
        ConfigError: If settings are unknown, out of range or contradict, or `output` holds another run.
        DataError: If the text cannot be read or does not fit.
        EvaluationError: If cells failed; all others are measured and drawn then, and `resume` runs the failed ones.
        KeyboardInterrupt: After Ctrl-C or SIGTERM; the message says what is kept.

    Source: paper, section 4.2 (tables 1 and 2).
    """
    require(Mapping | None, variants, "variants", "a mapping of names to settings")
    grid = GridOptions(
        methods=_listed(methods),
        variants=None if variants is None else dict(variants),
        sparsities=_listed(sparsities),
        match=match,
        seeds=_listed(seeds),
        shard=shard,
        keep_adapters=keep_adapters,
        budget=budget,
    )
    run = RunOptions(model=str(model), data=str(data), output=str(output), dtype=dtype, device=device)
    scoring = EvalOptions(
        data=None if held_out is None else str(held_out), tokens=tokens, window=window, batch_size=batch_size
    )
    scored = ScoredTasks(tasks=_listed(tasks), local_data=None if local_data is None else str(local_data), limit=limit)
    given, lora = settings or {}, recover or RecoverConfig()
    # As the command parses and saves it.
    values = {
        **_values(run, "report", "tensorboard", "tracker"),
        **_values(grid),
        **{
            name.replace("-", "_"): _values(method_settings(name, given.get(name, {}), "settings"))
            for name in sorted({*given, *grid.methods_needed} - {DENSE})
        },
        "train": _values(stage or StageConfig()),
        "objective": {name: getattr(objective or ObjectiveConfig(), name) for name in OBJECTIVE},
        "recover": _values(lora) | {"steps": lora.steps if recover else 0},
        "eval": _values(scoring) | _values(scored),
    }
    asked = request(values)
    folder = RunFolder(output, values, resume=resume, shared=shard is not None, overwrite=overwrite)
    ComparisonRun(asked, folder, command=["wide.compare", *methods]).run()
    found = read_comparison(Path(output))
    return ComparisonResult(folder=Path(output), rows=tuple(lines(found)), table=to_text(found))


def _listed(values: Any) -> Any:
    # As the command line reads it: one number is a number, and stands alone.
    values = list(values) if isinstance(values, Iterable) and not isinstance(values, str) else [values]
    return values[0] if len(values) == 1 else ",".join(map(str, values))


def _values(settings: Any, *without: str) -> dict[str, Any]:
    # The grid's seeds are those of every stage.
    return {name: value for name, value in asdict(settings).items() if name not in ("seed", *without)}
