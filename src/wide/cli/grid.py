"""The grid of a comparison: which cells there are, in which order, and which of them are this process's."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from wide.cli.method_flags import SETTINGS, VARIANT_KEYS, check_method, check_variants
from wide.cli.usage import UsageError
from wide.methods.catalogue import Match, get
from wide.report.cells import Cell

DENSE = "dense"
NEXT = "next"
"""The shard of a process that takes one free cell after the other."""
_TURNS = {"longest": 1, "long": 2, "short": 3}


@dataclass(frozen=True, kw_only=True, slots=True)
class GridOptions:
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
            living process holds, expensive methods first, until none is free; 'I/N' runs only every N-th cell beginning
            with the I-th; null runs all. Cells that are finished are left alone.
        keep_adapters: Whether adapters and checkpoints of finished cells stay; those of some methods are as large as
            the model.
        table: Folder of a comparison whose tables are drawn anew; nothing is run, and other flags are not needed.
    """

    methods: str
    variants: dict[str, Any] | None = None
    sparsities: float | str = "0.25,0.5"
    match: Match = "nominal"
    seeds: int | str = 17
    shard: str | None = None
    keep_adapters: bool = True
    table: str | None = None

    def __post_init__(self) -> None:
        """Refuse what is no grid."""
        variants = self.variants or {}
        check_variants(variants)
        for name in self.method_names:
            if name not in variants:
                check_method(name)
        for sparsity in self.sparsity_values:
            if not 0.0 < sparsity < 1.0:
                raise UsageError(f"sparsities must lie in (0, 1), got {sparsity:g}; the dense model is always there")
        for name, values in (
            ("methods", self.method_names),
            ("sparsities", self.sparsity_values),
            ("seeds", self.seed_values),
        ):
            if len(set(values)) < len(values) or not values:
                raise UsageError(f"{name} must be different values separated by commas, got {getattr(self, name)!r}")
        _ = self.part

    @property
    def method_names(self) -> list[str]:
        """The methods and variants by name, without the dense model."""
        return method_names(self.methods, self.variants or {})

    def method_of(self, name: str) -> str:
        """Return the method of a row."""
        return method_of(name, self.variants or {})

    def changes_of(self, name: str) -> dict[str, Any]:
        """Return the settings in which a row differs from its method's own."""
        return {key: value for key, value in (self.variants or {}).get(name, {}).items() if key not in VARIANT_KEYS}

    def match_of(self, name: str) -> Match:
        """Return what the sparsity of a row counts."""
        own: Match = (self.variants or {}).get(name, {}).get("match", self.match)
        return own

    @property
    def unused_variants(self) -> list[str]:
        """The variants that `methods` does not name, which therefore have no rows."""
        return [name for name in self.variants or {} if name not in self.method_names]

    @property
    def sparsity_values(self) -> list[float]:
        """The targets."""
        return [_number(word, "sparsities") for word in _words(self.sparsities)]

    @property
    def seed_values(self) -> list[int]:
        """The seeds."""
        numbers = [_number(word, "seeds") for word in _words(self.seeds)]
        if not all(number.is_integer() and number >= 0 for number in numbers):
            raise UsageError(f"seeds must be whole numbers from 0 separated by commas, got {self.seeds!r}")
        return [int(number) for number in numbers]

    @property
    def part(self) -> tuple[int, int]:
        """Which share of the cells may be run, (I, N), from (1, 1)."""
        if self.shard in (None, NEXT):
            return 1, 1
        assert self.shard is not None
        index, _, count = self.shard.partition("/")
        if not (index.isdigit() and count.isdigit() and 1 <= int(index) <= int(count)):
            raise UsageError(f"shard must be 'next', or I/N with 1 <= I <= N, such as 1/4, got {self.shard!r}")
        return int(index), int(count)

    def cells(self, *, recovers: bool) -> list[Cell]:
        """Return all cells of the grid: the dense model first, then sparsity by sparsity.

        Args:
            recovers: Whether there are rows with LoRA; the dense model then has a cell for every seed.
        """
        seeds = self.seed_values
        cells = [Cell(DENSE, 0.0, seed) for seed in (seeds if recovers else seeds[:1])]
        for sparsity in self.sparsity_values:
            cells += [Cell(name, sparsity, seed) for name in self.method_names for seed in seeds]
        return cells

    def own(self, cells: Sequence[Cell]) -> list[Cell]:
        """Return the cells that this process runs; those that it shares one by one, in the order to take them in."""
        if self.shard == NEXT:
            return sorted(cells, key=self._rank)
        index, count = self.part
        return list(cells[index - 1 :: count])

    def _rank(self, cell: Cell) -> int:
        """Return when a cell's turn is: what takes longest begins early, lest one process be left alone with it."""
        method = self.method_of(cell.method)
        # All other rows are relative to the dense one.
        return 0 if method == DENSE else _TURNS[get(method).duration]


def method_names(text: str, variants: Collection[str] = ()) -> list[str]:
    """Return the rows that a list on the command line names, without the dense model, which is always there.

    Args:
        text: Names separated by commas, or 'all'.
        variants: Names that 'all' stands for beside the methods.
    """
    words = [*SETTINGS, *variants] if text == "all" else _words(text)
    return [word for word in words if word != DENSE]


def method_of(name: str, variants: Mapping[str, Any]) -> str:
    """Return the method of a row: its own name, or what its variant says."""
    return str(variants[name]["method"]) if name in variants else name


def _words(text: float | str) -> list[str]:
    return [word.strip() for word in str(text).split(",") if word.strip()]


def _number(word: str, name: str) -> float:
    try:
        return float(word)
    except ValueError as error:
        raise UsageError(f"{name} must be numbers separated by commas, got {word!r}") from error
