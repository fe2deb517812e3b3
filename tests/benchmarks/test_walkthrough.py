"""The walk-through in docs/: its commands run and end as it says, its outputs are current, and its claims are true."""

import re
import shlex

import pytest

from autotp import Plan
from autotp.cli import app
from benchmarks.tables import DOCS
from benchmarks.walkthrough import BLOCK, GALLERY, PAGE, commands, gallery, plain, run, scratch
from costmodel import Topology, format_quantity

PAGE_TEXT = (DOCS / PAGE).read_text()
PROSE = " ".join(BLOCK.sub("", PAGE_TEXT).split())


def comparable(command, text):
    """The lines that are equal on all machines, without the table of rounding errors that ``verify`` prints."""
    return [line for line in text.splitlines() if command.words[0] != "verify" or line[0].isalpha()]


def time_of(seconds):
    return format_quantity(seconds, "time")


@pytest.mark.exact
def test_the_story():
    """One test, so that the commands run once and in order."""
    with scratch() as folder:
        outputs = {}
        for command, shown in zip(commands(PAGE_TEXT), BLOCK.finditer(PAGE_TEXT), strict=True):
            code, text, errors = run(command.words)
            assert code == command.code, f"{command.text}: exit code {code}\n{text.plain}{errors}"
            outputs[command.text] = text.plain
            before = shown[0].partition(command.text + "\n")[2].removesuffix("```\n")
            assert comparable(command, plain(text, command.last)) == comparable(command, before), (
                f"write docs/{PAGE} anew: {command.text}"
            )
        plans = {file.stem: Plan.load(file) for file in folder.glob("*.json") if file.stem != "trace"}
        claimed, measured = (Topology.load(folder / f"{name}.toml") for name in ("claimed", "measured"))
        trace = (folder / "trace.json").read_text()
    steps = {name: plan.predicted.step_seconds for name, plan in plans.items()}

    # A wrong topology: one figure is off by the factor of eight between bits and bytes.
    assert claimed.levels[0] == measured.levels[0] and claimed.device == measured.device
    assert claimed.levels[1].bandwidth == pytest.approx(8 * measured.levels[1].bandwidth)

    # Found: the plan is the best on the machine it was made for, and far from its prediction where it runs.
    assert plans["claimed"].optimal and plans["there"].hash == plans["claimed"].hash
    assert plans["there"].topology.name == "measured" and not plans["there"].optimal
    assert steps["there"] / steps["claimed"] == pytest.approx(1.44, abs=0.05) and "1.4 times" in PROSE
    dearest = max(plans["there"].operators, key=lambda op: op.seconds)
    assert (dearest.name, dearest.module) == ("linear_24", "head")
    told = plans["there"].predicted
    assert dearest.communication_seconds > (told.compute_seconds - told.update_seconds) * 2 / 3

    # Explained: the pins that are offered exist, and the best of them is what the page says.
    explained = next(text for words, text in outputs.items() if words.startswith("autotp explain linear_24"))
    pins = re.findall(r"│ (linear_24=\S+ \S+)", explained)
    assert pins == ["linear_24=m2@x m2@y", "linear_24=-@x m2@y", "linear_24=m2@x -@y", "linear_24=-@x -@y"]
    assert "chosen: data  linear_24=m2@x m2@y" in explained
    assert steps["kept"] - steps["pinned"] == pytest.approx(5e-3, rel=0.02) and "costs 5 ms" in PROSE

    # Pinned: the pin is kept, is faster, and is proven optimal.
    pinned = next(op for op in plans["pinned"].operators if op.name == "linear_24")
    assert pinned.assignment[0] == "n" and plans["pinned"].constraints == ("head=n@x",) and plans["pinned"].optimal
    kept = next(op for op in plans["kept"].operators if op.name == "linear_24")
    assert kept.assignment[0] == "m2" and steps["pinned"] < steps["kept"] < steps["there"]

    # Diffed: the exit code says that plans differ.
    assert [command.code for command in commands(PAGE_TEXT) if command.words[0] == "diff"] == [1]

    # Verified: slow, but correct.
    verified = [text for words, text in outputs.items() if words.startswith("autotp verify")]
    assert len(verified) == 3 and all("correct: " in text for text in verified)

    # Fixed: as good as the pinned plan without its pin, and so much faster than the bad one on the same machine.
    assert not plans["fixed"].constraints and plans["fixed"].topology.name == "measured"
    assert steps["fixed"] == pytest.approx(steps["pinned"], rel=1e-3)
    assert steps["there"] / steps["fixed"] == pytest.approx(1.8, abs=0.05) and "1.8 times as fast" in PROSE
    assert "traceEvents" in trace

    for name in ("claimed", "there", "fixed"):
        assert time_of(steps[name]) in PROSE, name


def test_the_words_of_the_story_are_all_there():
    used = {command.words[0] for command in commands(PAGE_TEXT)}
    assert used >= {"plan", "reprice", "inspect", "explain", "diff", "verify", "trace", "topology", "sweep"}
    assert any("--pin" in command.words for command in commands(PAGE_TEXT))


def test_every_command_has_its_picture():
    assert (DOCS / "cli-gallery.md").read_text() == gallery(), "python -m benchmarks.walkthrough --write"
    shown = {shlex.split(command)[1] for command, _ in GALLERY.values()}
    assert shown == {command.name for command in app.registered_commands}
    for name in GALLERY:
        drawn = (DOCS / "images" / f"cli-{name}.svg").read_text()
        assert drawn.startswith("<svg") and "@font-face" not in drawn and "url(http" not in drawn
