"""The results in docs are drawn from committed records, and drawing them again changes nothing."""

import json
import shutil
from pathlib import Path

import pytest
import yaml

from wide.cli.main import main
from wide.records import read_records

DOCS = Path(__file__).parents[2] / "docs"
H200 = DOCS / "measurements/records/h200"
# In the order of docs/results/h200/README.md: of equal measurements the last folder counts.
FOLDERS = ("decode-groups", "groups-256", "groups-512", "naive", "batches", "sparsity", "sweeps", ".", "steps")
NANO = DOCS / "results/nano-sweeps"
LAB = DOCS / "results/lab-88m"
RESULTS = {
    "lab-88m": [LAB],
    **{f"lab-88m/{name}-all": [LAB / name, LAB / f"{name}-fitted"] for name in ("n25", "f50")},
    "lab-88m/n50-all": [LAB / name for name in ("n50", "n50-rest", "n50-fitted")],
    "lab-88m/f25-all": [LAB / "f25"],
    "lab-88m/seeds-all": [LAB / f"seeds{name}" for name in ("", "-fitted", "-fitted-18", "-tyr", "-tyr-18")],
    "lab-88m/q-all": [LAB / name for name in ("q-sweep", "q-sweep-fitted", "n25-fitted", "n50-fitted")],
    "h200": [H200 / name for name in FOLDERS],
    "nano-sweeps": [NANO / "sparsity", NANO / "fitted"],
    "nano-sweeps/groups": [NANO / "groups"],
    "nano-sweeps/layers": [NANO / "layers"],
}


@pytest.mark.parametrize("name", RESULTS)
def test_committed_figures_are_those_of_the_committed_records(name, tmp_path):
    pytest.importorskip("matplotlib")
    sources, output = RESULTS[name], tmp_path / name
    if sources == [DOCS / "results" / name]:
        output.mkdir(parents=True)
        shutil.copy(sources[0] / "compare.jsonl", output)
        assert main(["report", str(output)]) == 0
    else:
        assert main(["report", *map(str, sources), "--output", str(output), "--only"]) == 0
    drawn = {path.name: path.read_text() for path in (output / "figures").glob("*.csv")}
    committed = {path.name: path.read_text() for path in (DOCS / "results" / name / "figures").glob("*.csv")}
    assert drawn == committed, f"draw docs/results/{name} again; its README says how"
    assert (DOCS / "results" / name / "report.html").stat().st_size < 2 * 2**20


GRIDS = sorted(path.stem for path in LAB.glob("*/*.yaml") if path.stem == path.parent.name)


@pytest.mark.parametrize("name", GRIDS)
def test_the_committed_configuration_is_still_understood_and_asks_for_the_rows_of_its_records(name, tmp_path, capsys):
    given = ["compare", "--config", str(LAB / name / f"{name}.yaml"), "--output", str(tmp_path), "--print_config"]
    assert main(given) == 0
    asked = yaml.safe_load(capsys.readouterr().out)
    rows = next(r.value for r in read_records(LAB / name / "compare.jsonl")[0] if r.metric == "grid.methods")
    assert asked["methods"].split(",") == json.loads(rows)
