"""`wide bench`: time the operators against dense peers on a GPU, from a checkout of the repository."""

import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from wide.cli.arguments import Arguments
from wide.errors import UsageError

_CHECKOUT = Path(__file__).resolve().parents[3]


def arguments() -> Arguments:
    return _bench().arguments()


def run(given: Sequence[str]) -> None:
    _bench().run(given)


def _bench() -> Any:
    if not (_CHECKOUT / "benchmarks" / "__init__.py").is_file():
        raise UsageError(
            "wide bench lies in benchmarks/ of the repository, which the installed package does not bring along; clone "
            "it, install it from there (make setup), and run this again"
        )
    if str(_CHECKOUT) not in sys.path:
        sys.path.append(str(_CHECKOUT))
    return importlib.import_module("benchmarks.bench")
