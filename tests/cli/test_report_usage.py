"""The usage line of `wide report`, and the manual's, have every flag."""

import re
from pathlib import Path

from wide.cli.main import main

MANUAL = Path(__file__).parents[2] / "docs" / "report.md"


def test_every_flag_of_wide_report_stands_in_its_usage(capsys):
    assert main(["report", "--help"]) == 0
    usage, _, rest = capsys.readouterr().out.partition("\n")
    flags = re.findall(r"^  (--\w+)", rest, flags=re.MULTILINE)
    assert flags == ["--output", "--only", "--rows"]
    assert all(flag in usage for flag in flags)
    assert usage.removeprefix("usage: ") in MANUAL.read_text(encoding="utf-8").splitlines()
