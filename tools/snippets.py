"""Run what the pages show: Python blocks from top to bottom, and `wide` commands up to the point where work begins.

Usage: python tools/snippets.py README.md docs/guide/*.md

Blocks of one page share their names, as in a session, and all pages share one new folder with a link to `models`, so
that a page can load what an earlier one saved. Training is cut to a few steps. A block is left out if the line before
it is a comment `<!-- not run: REASON -->`; the reason is printed. Of commands the flags are checked (`--print_config`),
with the placeholders of the pages as they stand.
"""

import os
import re
import shlex
import sys
import tempfile
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_NOT_RUN = re.compile(r"<!-- not run: (.*?) -->\s*\Z")
_STEPS = re.compile(r"(\bsteps\b[\"']?\s*[=:]\s*)\d+")
_FEW_STEPS = 2
# Commands that have no configuration to print.
_WITHOUT_CONFIG = ("report", "recipes", "methods")


@dataclass(frozen=True)
class Block:
    """One fenced block of a page.

    Args:
        language: As after the fence.
        text: Without the fences.
        line: Of the page, from 1.
        not_run: Why it is not run, or None.
    """

    language: str
    text: str
    line: int
    not_run: str | None


def blocks(page: Path) -> Iterator[Block]:
    """Return the fenced blocks of a page in order."""
    text = page.read_text()
    for found in _FENCE.finditer(text):
        reason = _NOT_RUN.search(text[: found.start()])
        line = text.count("\n", 0, found.start()) + 1
        yield Block(found[1], found[2], line, None if reason is None else reason[1])


def commands(page: Path) -> Iterator[tuple[int, list[str]]]:
    """Return the `wide` commands in the shell blocks of a page: line and arguments after `wide`."""
    for block in blocks(page):
        if block.language != "bash" or block.not_run:
            continue
        for number, line in _joined(block):
            words = shlex.split(line, comments=True)
            if words[:1] == ["wide"] and "..." not in words:
                yield number, words[1:]


def _joined(block: Block) -> Iterator[tuple[int, str]]:
    """Return the lines of a shell block, continued ones as one."""
    begun, first = "", block.line + 1
    for number, line in enumerate(block.text.splitlines(), block.line + 1):
        begun, first = (begun, first) if begun else ("", number)
        if line.rstrip().endswith("\\"):
            begun += line.rstrip()[:-1]
            continue
        yield first, begun + line
        begun = ""


def check_command(arguments: list[str]) -> str | None:
    """Return None if `wide` understands the arguments, otherwise what it says."""
    from wide.cli.main import COMMANDS, main

    if not arguments or arguments[0] not in COMMANDS:
        return f"there is no command {arguments[:1]}"
    if arguments[0] in _WITHOUT_CONFIG or "--version" in arguments:
        return None
    said, errors = StringIO(), StringIO()
    before, sys.stderr = sys.stderr, errors
    try:
        with redirect_stdout(said):
            code = main([*arguments, "--print_config"])
    finally:
        sys.stderr = before
    return None if code == 0 else errors.getvalue().strip()


def run_page(page: Path) -> int:
    """Run a page's Python blocks and check its commands; return how many failed."""
    failures = 0
    names: dict[str, object] = {"__name__": "__main__"}
    for block in blocks(page):
        if block.language != "python":
            continue
        where = f"{page.relative_to(ROOT)}:{block.line}"
        if block.not_run:
            print(f"  left out {where}: {block.not_run}")
            continue
        source = "\n" * block.line + _STEPS.sub(rf"\g<1>{_FEW_STEPS}", block.text)
        try:
            exec(compile(source, str(page), "exec"), names)
        except Exception as error:
            failures += 1
            print(f"  FAILED {where}: {type(error).__name__}: {error}")
            break
        print(f"  ran {where}", flush=True)
    for line, arguments in commands(page):
        message = check_command(arguments)
        if message is not None:
            failures += 1
            print(f"  FAILED {page.relative_to(ROOT)}:{line}: wide {' '.join(arguments)}: {message}")
    return failures


def main() -> int:
    """Run the pages that are named; return 1 if a block or a command failed."""
    pages = [Path(name).resolve() for name in sys.argv[1:]]
    failures = 0
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "models").symlink_to(ROOT / "models")
        os.chdir(folder)
        for page in pages:
            print(page.relative_to(ROOT), flush=True)
            failures += run_page(page)
        os.chdir(ROOT)
    print(f"{failures} failed" if failures else "all snippets run")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
