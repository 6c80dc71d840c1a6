"""The results in docs are drawn from committed records, and drawing them again changes nothing."""

import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import pytest
import yaml

from wide.cli.main import main
from wide.records import read_records

DOCS = Path(__file__).parents[2] / "docs"
H200 = DOCS / "measurements/records/h200"
# In the order of docs/results/h200/README.md: of equal measurements the last folder counts.
FOLDERS = (
    *("decode-groups", "groups-32", "groups-32-decode", "groups-64", "groups-256", "groups-512", "naive"),
    *("batches", "batches-rates"),
    *("prefill-batches", "sparsity", "sweeps", "prefill-energy", "rates"),
    *(".", "steps", "sweeps-native", "rows"),
)
NANO = DOCS / "results/nano-sweeps"
LAB = DOCS / "results/lab-88m"
RUNS = ("fitted-50", "fitted-50-routers", "clustered")
GROUPS = "f16-a192,f256-a192,f512-a192,f128-a64,f128-a384,f128-a768,wide,wide-32,wide-64"
# Of some pages only these rows are drawn, beside the dense ones.
STATIC = "tyr,ddp,slicegpt,blockpruner,cooppruner,shortened-ppl,shortened-taylor"
ROWS = {
    "lab-88m/q-all": "wide,ddp,skipgpt,wide-fitted",
    "lab-88m/g-all": GROUPS,
    "lab-88m/equal-all": f"{STATIC},wide,wide-32,wide-64,wide-uniform,wide-fitted",
    "lab-88m/f50-seeds-all": "tyr,ddp,wide,wide-fitted",
    "lab-88m/skipgpt-all": "skipgpt,blockpruner,f128-a768,wide",
}
RESULTS = {
    "lab-88m": [LAB],
    "lab-88m/n25-all": [LAB / name for name in ("n25", "n25-fitted")],
    "lab-88m/f25-all": [LAB / name for name in ("f25-tasks", "f25", "f25-groups", "f25-fitted")],
    "lab-88m/n25-tasks-all": [LAB / name for name in ("n25-tasks", "n25-fitted-tasks")],
    "lab-88m/f25-tasks-all": [LAB / name for name in ("f25-tasks", "f25-fitted-tasks")],
    "lab-88m/f50-tasks-all": [LAB / name for name in ("f50-tasks", "f50-fitted-tasks")],
    "lab-88m/f50-all": [LAB / name for name in ("f50-tasks", "f50", "f50-groups", "f50-fitted", "f50-clustered")],
    "lab-88m/f50-seeds-all": [LAB / name for name in ("f50", "f50-fitted", "f50-seeds", "f50-seeds-fitted")],
    "lab-88m/equal-all": [LAB / name for name in ("n50", "n50-rest", "n50-fitted", "equal")],
    "lab-88m/n50-all": [LAB / name for name in ("n50", "n50-rest", "n50-fitted")],
    "lab-88m/parts-all": [LAB / name for name in ("parts", "parts-sharp", "parts-plain", "parts-hot", "f50-fitted")],
    "lab-88m/seeds-all": [LAB / f"seeds{name}" for name in ("", "-fitted", "-fitted-18", "-tyr", "-tyr-18")],
    "lab-88m/q-all": [LAB / name for name in ("q-sweep", "q-sweep-fitted", "n25", "n50", "n25-fitted", "n50-fitted")],
    "lab-88m/g-all": [LAB / name for name in ("g-sweep", "n50")],
    "lab-88m/skipgpt-all": [
        *(LAB / name for name in ("n50", "skipgpt-seeds", "skipgpt-slow", "skipgpt-smooth", "skipgpt-long", "g-sweep"))
    ],
    "lab-88m/speed-all": [LAB / name for name in ("f50", "f25", "n50-fitted")],
    "lab-88m/runs": [LAB / "runs" / name for name in RUNS],
    **{str(path.parent.relative_to(DOCS / "results")): [path.parent] for path in LAB.glob("runs/**/records.jsonl")},
    "h200": [H200 / name for name in FOLDERS],
    "nano-sweeps": [NANO / "sparsity", NANO / "fitted"],
    "nano-sweeps/groups": [NANO / "groups"],
    "nano-sweeps/layers": [NANO / "layers"],
}


@pytest.fixture
def without_pictures(monkeypatch):
    """Draw figures without rendering them, which takes most of the time: their values are compared, not their dots."""
    canvas = pytest.importorskip("matplotlib.figure").Figure
    empty = '<svg xmlns="http://www.w3.org/2000/svg" width="1pt" height="1pt" viewBox="0 0 1 1"></svg>'
    monkeypatch.setattr(
        canvas, "savefig", lambda _, file, **__: file.write(empty) if hasattr(file, "write") else file.touch()
    )


@pytest.mark.parametrize("name", RESULTS)
@pytest.mark.usefixtures("without_pictures")
def test_committed_figures_are_those_of_the_committed_records(name, tmp_path):
    sources, output = RESULTS[name], tmp_path / name
    if sources == [DOCS / "results" / name]:
        for path in (*sources[0].glob("*.jsonl"), *sources[0].glob("profile/*.json")):
            place = output / path.relative_to(sources[0])
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, place)
        assert main(["report", str(output)]) == 0
    else:
        rows = ["--rows", ROWS[name]] if name in ROWS else []
        assert main(["report", *map(str, sources), *rows, "--output", str(output), "--only"]) == 0
    drawn = {path.name: path.read_text() for path in (output / "figures").glob("*.csv")}
    committed = {path.name: path.read_text() for path in (DOCS / "results" / name / "figures").glob("*.csv")}
    assert drawn == committed, f"draw docs/results/{name} again; its README says how"
    assert (DOCS / "results" / name / "report.html").stat().st_size < 2 * 2**20


class Links(HTMLParser):
    """What a page leads to."""

    def __init__(self, text):
        super().__init__()
        self.found = set()
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.found |= {value for name, value in attrs if name in ("href", "src") and value}


PAGES = sorted(str(path.relative_to(DOCS)) for path in DOCS.glob("results/**/report.html"))


def test_every_committed_page_is_drawn_again():
    assert {f"results/{name}/report.html" for name in RESULTS} >= set(PAGES)


@pytest.mark.parametrize("page", PAGES)
def test_a_committed_page_has_no_dead_links(page):
    links = {link.partition("#")[0] for link in Links((DOCS / page).read_text()).found if ":" not in link}
    assert links
    assert not [link for link in sorted(links) if link and not ((DOCS / page).parent / link).exists()]


TEXTS = [*DOCS.glob("results/**/*.md"), DOCS / "report.md", DOCS.parent / "README.md"]


@pytest.mark.parametrize("page", TEXTS, ids=lambda page: str(page.relative_to(DOCS.parent)))
def test_texts_on_results_have_no_dead_links(page):
    links = {link.partition("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()) if ":" not in link}
    assert not [link for link in sorted(links) if link and not (page.parent / link).exists()]


GRIDS = sorted(path.stem for path in LAB.glob("*/*.yaml") if path.stem == path.parent.name)


@pytest.mark.parametrize("name", GRIDS)
def test_the_committed_configuration_is_still_understood_and_asks_for_the_rows_of_its_records(name, tmp_path, capsys):
    given = ["compare", "--config", str(LAB / name / f"{name}.yaml"), "--output", str(tmp_path), "--print_config"]
    assert main(given) == 0
    asked = yaml.safe_load(capsys.readouterr().out)
    rows = next(r.value for r in read_records(LAB / name / "compare.jsonl")[0] if r.metric == "grid.methods")
    assert asked["methods"].split(",") == json.loads(rows)
