"""The grid of a comparison: rows, cells and their order, this process's share of them, and the text that they read."""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, get_args, get_type_hints

from jsonargparse import ArgumentError, ArgumentParser

from wide.config import ObjectiveConfig, RecoverConfig, StageConfig
from wide.errors import ConfigError, UsageError, nearest
from wide.methods.catalogue import Match, get, names
from wide.records import Cell, Stage
from wide.runs.settings import EvalOptions, LoraOptions, RunOptions, ScoredTasks, build, calibration_tokens
from wide.schema import Checked

OBJECTIVE = ("weight", "distillation", "smoothing")
"""What of the objective can be set for every method that trains routers; the target says the rest."""
VARIANT_KEYS = ("method", "match")
"""What a variant may say beside settings of its method."""
DENSE = "dense"
_TURNS = {"longest": 1, "long": 2, "short": 3}
# The settings that say how much of a sequence a method reads at once.
_LENGTHS = ("window_length", "search_window_length", "sequence_length")


@dataclass(frozen=True, kw_only=True, slots=True)
class GridOptions(Checked):
    """What is compared.

    Args:
        methods: Methods separated by commas (wide methods lists them), variants among them, or 'all'; the dense model
            is always there.
        variants: Further rows by name: a method and the settings in which the row differs from the method's own, e.g.
            {wide-g32: {method: wide, ffn_group_size: 32}}; with the key match a row counts its sparsity in its own way.
        sparsities: Shares to prune, in (0, 1), separated by commas.
        match: What the sparsities count: 'nominal' as each method's paper does, 'linear_flops' the matrix-product
            work of all decoder layers, keys and values included, the output head not.
        seeds: Seeds separated by commas; with several, the table shows means and standard deviations.
        shard: How processes share a grid and a folder: 'next' takes the next cell that is not finished and that no
            living process holds, expensive methods first, until none is free; null runs all.
        keep_adapters: Whether adapters and checkpoints of finished cells stay; those of some methods are as large as
            the model.
        budget: Calibration text of all rows: 'original' reads what each method's settings say, which by default is what
            its authors read; 'equal' gives every method as many tokens of text as the training of routers reads
            (train.steps x batch_size x sequence_length), or the whole text where that is less. How often a method reads
            its text is its own.
    """

    methods: str
    variants: dict[str, Any] | None = None
    sparsities: float | str = "0.25,0.5"
    match: Match = "nominal"
    seeds: int | str = 17
    shard: Literal["next"] | None = None
    keep_adapters: bool = True
    budget: Literal["original", "equal"] = "original"

    def __post_init__(self) -> None:
        Checked.__post_init__(self)
        check_variants(self.variants or {})
        for name in self.method_names:
            get(self.method_of(name))
        for sparsity in self.sparsity_values:
            if not 0.0 < sparsity < 1.0:
                raise UsageError(f"sparsities must lie in (0, 1), got {sparsity:g}; the dense model is always there")
        found: dict[str, list[Any]] = {
            "methods": self.method_names,
            # As folders of cells have them.
            "sparsities": [f"{value:g}" for value in self.sparsity_values],
            "seeds": self.seed_values,
        }
        for name, values in found.items():
            if len(set(values)) < len(values) or not values:
                raise UsageError(f"{name} must be different values separated by commas, got {getattr(self, name)!r}")

    @property
    def method_names(self) -> list[str]:
        """The methods and variants by name, without the dense model."""
        words = [*names(), *(self.variants or {})] if self.methods == "all" else _words(self.methods)
        return [word for word in words if word != DENSE]

    @property
    def methods_needed(self) -> list[str]:
        """The methods of all rows, the dense one included, in the order of the catalogue."""
        needed = {DENSE, *map(self.method_of, self.method_names)}
        return [name for name in names() if name in needed]

    def _variant(self, name: str) -> Mapping[str, Any]:
        return (self.variants or {}).get(name, {})

    def method_of(self, name: str) -> str:
        """Return the method of a row."""
        return str(self._variant(name).get("method", name))

    def changes_of(self, name: str) -> dict[str, Any]:
        """Return the settings in which a row differs from its method's own."""
        return {key: value for key, value in self._variant(name).items() if key not in VARIANT_KEYS}

    def match_of(self, name: str) -> Match:
        """Return what the sparsity of a row counts."""
        return self._variant(name).get("match", self.match)  # type: ignore[no-any-return]

    @property
    def sparsity_values(self) -> list[float]:
        """The targets."""
        return [_number(word, "sparsities") for word in _words(self.sparsities)]

    @property
    def seed_values(self) -> list[int]:
        """The seeds."""
        numbers = [_number(word, "seeds") for word in _words(self.seeds)]
        if not all(number.is_integer() and 0 <= number < 2**63 for number in numbers):
            raise UsageError(f"seeds must be whole numbers in [0, 2**63) separated by commas, got {self.seeds!r}")
        return [int(number) for number in numbers]

    def cells(self, *, recovers: bool) -> list[Cell]:
        """Return all cells: the dense model, for every seed where rows have LoRA, then sparsity by sparsity."""
        seeds = self.seed_values
        cells = [Cell(DENSE, 0.0, seed) for seed in (seeds if recovers else seeds[:1])]
        for sparsity in self.sparsity_values:
            cells += [Cell(name, sparsity, seed) for name in self.method_names for seed in seeds]
        return cells

    def own(self, cells: Sequence[Cell]) -> list[Cell]:
        """Return the cells that this process may run, in the order to take them in."""
        return list(cells) if self.shard is None else sorted(cells, key=self._rank)

    def _rank(self, cell: Cell) -> int:
        """Return when a cell's turn is: what takes longest begins early, lest one process be left alone with it."""
        # All other rows are relative to the dense one.
        return 0 if cell.method == DENSE else _TURNS[get(self.method_of(cell.method)).duration]


@dataclass(frozen=True, kw_only=True, slots=True)
class CompareRequest:
    """Everything that one comparison is told.

    `settings` are those of every row by name, the dense model's included; `stage` packs the text of all methods;
    without `recover` there is no LoRA.
    """

    run: RunOptions
    grid: GridOptions
    settings: Mapping[str, Any]
    objective: ObjectiveConfig
    stage: StageConfig
    recover: RecoverConfig | None
    scoring: EvalOptions
    tasks: ScoredTasks

    def __post_init__(self) -> None:
        if self.scoring.tokens == 0 and not self.tasks.names:
            raise UsageError("nothing to compare by: let --eval.tokens be above 0, or name tasks with --eval.tasks")
        longest = self.stage.sequence_length
        for row, settings in self.settings.items():
            for name in _LENGTHS:
                length = getattr(settings, name, None)
                if length is not None and length > longest:
                    raise ConfigError(
                        f"{row}.{name} {length} is longer than the sequences of {longest} tokens into which the text "
                        "of all rows is packed; lower it, or raise train.sequence_length"
                    )

    @property
    def max_tokens(self) -> int:
        """Tokens of training text that the comparison can use."""
        read = [calibration_tokens(settings, self.stage) for settings in self.settings.values()]
        return max(read, default=0) + sum(each.num_tokens for each in (self.stage, self.recover) if each is not None)

    def own_cells(self) -> list[Cell]:
        """Return the cells that this process runs, in their order."""
        return self.grid.own(self.grid.cells(recovers=self.recover is not None))

    def stages(self, cell: Cell) -> list[Stage]:
        """Return the stages of a cell: calibration, and LoRA."""
        # The dense model is the same for all seeds, so it is evaluated for the first one only.
        first = cell.method != DENSE or cell.seed == self.grid.seed_values[0]
        found = [(False, first), (True, self.recover is not None)]
        return [Stage(cell, recovered) for recovered, is_there in found if is_there]


def as_many_tokens(settings: Any, stage: StageConfig, num_tokens: int) -> Any:
    """Return settings with which a method reads as many tokens as routers are trained on, at most `num_tokens`."""
    names, wanted = {field.name for field in fields(settings)}, min(stage.num_tokens, num_tokens)
    if "steps" in names:
        length = settings.sequence_length or stage.sequence_length
        return replace(settings, steps=max(1, wanted // (settings.batch_size * length)))
    if "num_windows" in names:
        # Windows lie within blocks.
        most = num_tokens // stage.sequence_length * (stage.sequence_length // settings.window_length)
        return replace(settings, num_windows=max(1, min(wanted // settings.window_length, most)))
    return settings


def check_variants(variants: Mapping[str, Any]) -> None:
    """Refuse variants (see `GridOptions`) that name no method that prunes, or have the name of a method."""
    for name, entry in variants.items():
        where = f"variants: {name}"
        if name in names() or name == "all" or not re.fullmatch(r"[A-Za-z0-9][\w.=+-]*", name):
            raise UsageError(f"{where}: a variant needs a name of its own, of letters, digits and . = + - _")
        if not isinstance(entry, Mapping) or not isinstance(entry.get("method"), str):
            raise UsageError(f"{where} must be a mapping with the key 'method', got {entry!r}")
        if entry["method"] == DENSE:
            raise UsageError(f"{where}: the dense model has no variants; it is in every comparison, under its own name")
        if entry.get("match", "nominal") not in get_args(Match):
            raise UsageError(f"{where}: match must be one of {', '.join(get_args(Match))}, got {entry['match']!r}")
        _check_settings(entry["method"], set(entry) - set(VARIANT_KEYS), where)


def method_settings(method: str, changes: Mapping[str, Any], where: str, settings: Any = None) -> Any:
    """Return settings of a method (None: the original's) with some changed, whose types are checked as flags' are.

    Raises UsageError if there is no such method or setting, or a value has a wrong type; ConfigError if a value is out
    of its range.
    """
    _check_settings(method, changes, where)
    cls = get(method).settings
    parser, hints = ArgumentParser(exit_on_error=False), get_type_hints(cls)
    for key in changes:
        parser.add_argument(f"--{key}", type=hints[key])
    try:
        typed = parser.parse_object(dict(changes)).as_dict()
        return replace(cls() if settings is None else settings, **typed)
    except ArgumentError as error:
        raise UsageError(f"{where}: {' '.join(str(error).split())}") from error
    except ConfigError as error:
        raise type(error)(f"{where}: {error}") from error


def _check_settings(method: str, changes: Collection[str], where: str) -> None:
    try:
        known = [field.name for field in fields(get(method).settings) if field.name != "seed"]
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from error
    for key in changes:
        if key not in known:
            hint = nearest(str(key), known, otherwise=f"; it has {', '.join(known) or 'none'}")
            raise UsageError(f"{where}: method {method} has no setting {key!r}{hint}")


def request(values: Mapping[str, Any]) -> CompareRequest:
    """Return the comparison that values describe: flags by name, groups of them as mappings."""
    grid, lora = build(GridOptions, values), build(LoraOptions, values, group="recover")
    settings = {}
    for name in (DENSE, *grid.method_names):
        method = grid.method_of(name)
        own = build(get(method).settings, values, group=method)
        # A variant's own settings stand on top of those of its method.
        settings[name] = method_settings(method, grid.changes_of(name), f"variants: {name}", own)
    objective = build(ObjectiveConfig, values, group="objective")
    recover = build(RecoverConfig, values, group="recover") if lora.steps else None
    if recover is not None and recover.distillation is None and objective.distillation:
        # One LoRA for all rows: what was not trained records no objective.
        recover = replace(recover, distillation=objective.distillation)
    return CompareRequest(
        run=build(RunOptions, values),
        grid=grid,
        settings=settings,
        objective=objective,
        stage=build(StageConfig, values, group="train"),
        recover=recover,
        scoring=build(EvalOptions, values, group="eval"),
        tasks=build(ScoredTasks, values, group="eval"),
    )


def _words(text: float | str) -> list[str]:
    return [word.strip() for word in str(text).split(",") if word.strip()]


def _number(word: str, name: str) -> float:
    try:
        return float(word)
    except ValueError as error:
        raise UsageError(f"{name} must be numbers separated by commas, got {word!r}") from error
