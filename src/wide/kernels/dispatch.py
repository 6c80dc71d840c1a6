"""From the name of a backend to its kernel.

The backend NAME of an operator is the file `_NAME.py` in the operator's folder. The file registers itself, and it is
imported when somebody first uses the name: languages that are not used are not imported.
"""

import importlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import torch

from wide.errors import UnsupportedBackendError

Run = Callable[..., Any]
RunT = TypeVar("RunT", bound=Run)

# Packages with folders of operators, and where they are.
_ROOTS = {"wide.kernels": Path(__file__).parent}


def look_in(package: str, folder: Path) -> None:
    """Find backends in another package, too: in its folders that bear the names of the operators' folders."""
    _ROOTS[package] = folder


def backend_names() -> set[str]:
    """Return the names of all backends that have files of their own; nothing is imported."""
    return {path.stem[1:] for folder in _ROOTS.values() for path in folder.glob("*/_[a-z]*.py")}


class UnfitError(Exception):
    """A kernel does not take its tensors or its tile, as the message says; the operator adds what to choose instead."""


class Shape(Protocol):
    """What a backend may refuse: sizes of a call, and the dtype of its floating-point inputs."""

    @property
    def dtype(self) -> torch.dtype:
        """Of the floating-point inputs."""


class AnyShape(NamedTuple):
    """The shape of operators whose kernels take all sizes."""

    dtype: torch.dtype


class Candidate(NamedTuple):
    """What tuning tries of a backend.

    Args:
        tile: Fields of the backend's tile; empty means its default.
        block_m: Rows in a tile, for the reordering; 0 means its default.
        groups_per_block: Groups in a super-block, for the pattern sort; 0 means not applicable.
    """

    tile: tuple[int, ...] = ()
    block_m: int = 0
    groups_per_block: int = 0


def listed(tiles: Sequence[tuple[int, ...]], *, few: int) -> Callable[..., Iterable[Candidate]]:
    """Return the `candidates` of a backend that tries the same tiles for every shape, or the first few of them."""
    return lambda shape, device, is_quick: map(Candidate, tiles[:few] if is_quick else tiles)


def _no_obstacle(*_: object) -> None:
    """Need nothing, or take everything."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Backend:
    """One implementation of an operator.

    Args:
        run: Takes what its operator hands to `Backends.run`.
        needs: Returns what a device or this installation lacks for tensors of a dtype, or None.
        supports: Returns why no device runs a shape, or None.
        candidates: Returns what tuning tries for a shape on a device; few of them if the third argument is True.
        takes: Names of what `run` takes.
    """

    run: Run
    needs: Callable[[torch.device, torch.dtype], str | None]
    supports: Callable[[Any], str | None]
    candidates: Callable[[Any, torch.device, bool], Iterable[Candidate]]
    takes: frozenset[str]

    @property
    def takes_int8(self) -> bool:
        """Whether `run` takes weights in int8."""
        return not self.takes.isdisjoint(("scale", "int8"))


class Backends:
    """The backends of one operator, in the folder of its package; iterating gives their names and imports them.

    Its reference is the backend 'torch'.
    """

    def __init__(self, operator: str, package: str | None, reference: Run) -> None:
        self.operator = operator
        self._folder = str(package).rpartition(".")[2]
        self._known: dict[str, Backend] = {}
        self.register("torch")(reference)

    def register(
        self,
        name: str,
        *,
        needs: Callable[[torch.device, torch.dtype], str | None] = _no_obstacle,
        supports: Callable[[Any], str | None] = _no_obstacle,
        candidates: Callable[[Any, torch.device, bool], Iterable[Candidate]] = lambda *_: (Candidate(),),
    ) -> Callable[[RunT], RunT]:
        """Return a decorator that makes a function the backend of this name; arguments as of `Backend`."""

        def keep(run: RunT) -> RunT:
            takes = frozenset(inspect.signature(run).parameters)
            self._known[name] = Backend(run=run, needs=needs, supports=supports, candidates=candidates, takes=takes)
            return run

        return keep

    def __iter__(self) -> Iterator[str]:
        """Return the names, the reference's first."""
        for name in self._modules():
            self._import(name)
        return iter(sorted(self._known, key=lambda name: (name != "torch", name)))

    def missing(self, name: str, device: torch.device, dtype: torch.dtype) -> str | None:
        """Return what a backend lacks on a device, whatever the shape, or None."""
        found = self._find(name)
        return found if isinstance(found, str) else found.needs(device, dtype)

    def takes(self, name: str, option: str) -> bool:
        """Return whether a backend's function has a parameter."""
        found = self._find(name)
        return isinstance(found, Backend) and option in found.takes

    def misfit(self, name: str, shape: Shape) -> str | None:
        """Return why a backend does not take a shape, on whatever device, or None; `missing` says if there is none."""
        found = self._find(name)
        if isinstance(found, str):
            return None
        if shape.dtype == torch.int8 and not found.takes_int8:
            return f"the backend {name!r} has no int8 weights"
        return found.supports(shape)

    def obstacle(self, name: str, device: torch.device, shape: Shape) -> str | None:
        """Return why a backend does not run a shape on a device, or None."""
        return self.missing(name, device, shape.dtype) or self.misfit(name, shape)

    def candidates(self, shape: Shape, device: torch.device, *, quick: bool) -> Iterator[tuple[str, Candidate]]:
        """Yield what tuning tries on a device, few candidates of each backend first, with the name of the backend.

        If `quick` is true these few are all. The backends are all but the reference and 'dense'.
        """
        tried = [name for name in self if name not in ("torch", "dense")]
        fitting = [name for name in tried if self.obstacle(name, device, shape) is None]
        for few in (True,) if quick else (True, False):
            for name in fitting:
                for candidate in self._known[name].candidates(shape, device, few):
                    yield name, candidate

    def run(
        self, name: str, device: torch.device, shape: Shape, *arguments: Any, tile: Any = None, **options: Any
    ) -> Any:
        """Run a backend.

        It takes `arguments`, `options`, and the tile unless that is empty.

        Raises UnsupportedBackendError if there is no such backend or it does not run this here.
        """
        found = self._known.get(name) or self._find(name)
        if isinstance(found, str):
            raise self._refusal(name, found, device, shape)
        reason = found.needs(device, shape.dtype) or self.misfit(name, shape)
        if tile:
            options["tile"] = tile
            if "tile" not in found.takes:
                reason = reason or f"the backend {name!r} has no tiles, got {tuple(tile)}"
        if "scale" in options and not found.takes_int8:
            reason = reason or f"the backend {name!r} has no int8 weights"
        if reason is not None:
            raise self._refusal(name, reason, device, shape)
        try:
            return found.run(*arguments, **options)
        except UnfitError as unfit:
            raise self._refusal(name, str(unfit), device, shape) from None

    def _refusal(self, name: str, reason: str, device: torch.device, shape: Shape) -> UnsupportedBackendError:
        others = [repr(other) for other in self if other != name and self.obstacle(other, device, shape) is None]
        instead = " or ".join(([", ".join(others[:-1])] if others[1:] else []) + others[-1:])
        return UnsupportedBackendError(f"{self.operator}: {reason}" + (f"; choose backend={instead}" if others else ""))

    def _find(self, name: str) -> Backend | str:
        reason = None if name in self._known else self._import(name)
        if reason is not None:
            return f"the backend {name!r} cannot be imported here ({reason})"
        return self._known.get(name) or f"there is no backend {name!r}, only {list(self)}"

    def _import(self, name: str) -> str | None:
        """Import the file of a backend, if there is one; return why that cannot be done here, or None."""
        module = self._modules().get(name)
        try:
            if module is not None:
                importlib.import_module(module)
        except ImportError as error:
            if str(error.name).partition(".")[0] in {root.partition(".")[0] for root in _ROOTS}:
                raise
            return str(error)
        return None

    def _modules(self) -> dict[str, str]:
        return {
            path.stem[1:]: f"{root}.{self._folder}.{path.stem}"
            for root, folder in _ROOTS.items()
            for path in sorted((folder / self._folder).glob("_[a-z]*.py"))
        }


def require(reason: str | None) -> None:
    """Refuse what a kernel does not take; raises UnfitError if there is a reason."""
    if reason is not None:
        raise UnfitError(reason)


def largest_tile(size: int, limit: int) -> int:
    """Return the largest power of two that divides `size` and is at most `limit`."""
    return min(size & -size, limit)
