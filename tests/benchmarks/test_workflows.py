"""The rows of the comparison with FSDP2: with autotp, none is wrong or silent."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.workflows.mistakes import ROWS

ROOT = Path(__file__).parents[2]


def test_every_row_is_in_the_table():
    shown = (ROOT / "docs" / "workflows.md").read_text()
    assert len(ROWS) >= 60
    assert [row.name for row in ROWS if f"| {row.name} |" not in shown] == []
    assert "**differs**" not in "".join(re.findall(r"^\| .*? \| (.*?) \|", shown, re.MULTILINE))


@pytest.mark.exact
@pytest.mark.distributed
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("processes", ["2", "4"])
def test_no_row_is_wrong_or_silent(processes):
    command = [sys.executable, "-m", "benchmarks.workflows", "--side", "autotp", "--processes", processes]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
