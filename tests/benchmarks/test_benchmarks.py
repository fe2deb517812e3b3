"""The claims of the tables in docs/ hold; ``outcome`` itself fails if auto loses, or a family in its own setting."""

import re
from pathlib import Path

import pytest

from autotp import FAMILIES
from benchmarks.rediscovery import SETTINGS, outcome

DOCS = Path(__file__).parents[2] / "docs"
QUICK = ("megatron-sp",)


def test_every_family_has_a_setting():
    assert [s.family for s in SETTINGS] == [name for name in FAMILIES if name != "auto"]


@pytest.mark.exact
@pytest.mark.parametrize(
    "setting",
    [pytest.param(s, marks=[] if s.family in QUICK else pytest.mark.exact, id=s.family) for s in SETTINGS],
)
def test_the_whole_space_is_never_worse(setting):
    found = outcome(setting)
    assert set(found) == set(FAMILIES)


def test_documented_tables_come_from_commands():
    by_hand = {"command-line", "fuzzing", "index", "limits", "papers", "strategies", "upstream"}
    for page in (page for page in DOCS.glob("*.md") if page.stem not in by_hand):
        command = re.search(r"`python -m benchmarks\.(\w+) --write`", page.read_text())
        assert command is not None, page
        program = Path(__file__).parents[2] / "benchmarks" / command[1]
        assert program.with_suffix(".py").is_file() or (program / "__main__.py").is_file()
