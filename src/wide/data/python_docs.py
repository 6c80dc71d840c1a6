"""The text that every CPython carries: its topics and the docstrings of its standard library.

About 2 MB of English technical prose (CPython 3.11: 79 topics and 572 modules) that needs no download. Docstrings
are read from source with `ast`; nothing of the standard library is imported or executed, except the topics, which are
one dictionary of strings. A docstring that occurs twice is kept where it occurs first, modules in alphabetical order.
The text differs a little from one Python version to the next: compare figures of one version only.
"""

import ast
import sysconfig
import tokenize
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path

from wide.data.documents import Document
from wide.errors import DataError

# Tests, other people's packages and build leftovers are not documentation of the library.
_EXCLUDED = {"test", "tests", "idlelib", "site-packages", "dist-packages", "turtledemo"}
_EXCLUDED |= {"pydoc_data", "_bundled", "__pycache__"}
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
_HOLDERS = (ast.stmt, ast.excepthandler, ast.match_case)


@cache
def python_docs() -> tuple[Document, ...]:
    """Return all documents, topics first, each group ordered by name.

    Raises DataError if this interpreter was installed without topics or without sources.
    """
    documents = (*_topics(), *_modules(Path(sysconfig.get_paths()["stdlib"])))
    if not any(document.name.startswith("module:") for document in documents):
        raise DataError(
            f"the standard library at {sysconfig.get_paths()['stdlib']} has no readable sources; "
            "name a local file or a data set instead of 'python-docs'"
        )
    return documents


def _topics() -> Iterator[Document]:
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise DataError(
            "this Python was installed without pydoc_data, which 'python-docs' reads; "
            "name a local file or a data set instead"
        ) from error
    for key in sorted(topics):
        if topics[key].strip():
            yield Document(name=f"topic:{key}", text=topics[key].strip())


def _modules(root: Path) -> Iterator[Document]:
    seen: set[str] = set()
    for name, path in sorted(_sources(root)):
        fresh = [text for text in dict.fromkeys(_docstrings(path)) if text not in seen]
        seen.update(fresh)
        if fresh:
            yield Document(name=f"module:{name}", text="\n\n".join(fresh))


def _sources(root: Path) -> Iterator[tuple[str, Path]]:
    for path in root.rglob("*.py"):
        parts = path.relative_to(root).with_suffix("").parts
        # Folders such as config-3.11-x86_64-linux-gnu are no packages.
        if _EXCLUDED.isdisjoint(parts) and all(part.isidentifier() for part in parts):
            yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


def _docstrings(path: Path) -> Iterator[str]:
    # The standard library holds deliberately broken files (fixtures of its own parsers).
    with suppress(SyntaxError, UnicodeDecodeError, ValueError), tokenize.open(path) as file:
        # Breadth first, without expressions, which hold no docstring and are most of the nodes.
        nodes: list[ast.AST] = [ast.parse(file.read())]
        for node in nodes:
            nodes += [child for child in ast.iter_child_nodes(node) if isinstance(child, _HOLDERS)]
            if isinstance(node, _DOCUMENTED) and (text := (ast.get_docstring(node) or "").strip()):
                yield text
