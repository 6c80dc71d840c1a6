"""Configuration of the documentation site; `make docs` builds it."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

from wide.version import __version__  # noqa: E402

project = "wide"
author = "the authors of wide"
copyright = "the authors of wide, Apache-2.0"
release = version = __version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.doctest",
    "sphinx.ext.mathjax",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build", "results/*/**", "measurements/**"]
nitpicky = False

myst_enable_extensions = ["dollarmath", "amsmath", "deflist"]
myst_heading_anchors = 3

autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_member_order = "bysource"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
doctest_global_setup = "import wide"

html_theme = "furo"
html_title = f"wide {__version__}"
html_static_path: list[str] = []
html_theme_options = {"navigation_with_keys": True}
copybutton_exclude = ".linenos, .gp, .go"


def _plain(app: object, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    """Keep bars and stars of formulas in docstrings from being read as markup."""
    del app, what, name, obj, options
    inside = False
    for index, line in enumerate(lines):
        pieces = line.split("``")
        for position in range(0, len(pieces), 2):
            if not inside:
                pieces[position] = pieces[position].replace("|", "\\|").replace(" * ", " \\* ")
        lines[index] = "``".join(pieces)


def setup(app: object) -> None:
    """Register what this project adds to Sphinx."""
    app.connect("autodoc-process-docstring", _plain)  # type: ignore[attr-defined]
