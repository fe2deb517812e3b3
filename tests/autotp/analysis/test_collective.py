"""The cost of a collective, as a formula and as a number."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from autotp.analysis.collective import explain_collective
from autotp.cli import app
from autotp.errors import AutotpError
from costmodel import Topology, collectives


def test_explaining_a_collective():
    topology = Topology.load("dgx-h100").resized(64)
    found = explain_collective("all_reduce", topology, (8, 8), (0,), 32e6)
    link = topology.link((8, 8), (0,), "all_reduce")
    assert found["seconds"] == pytest.approx(float(collectives.of_link("all_reduce", 32e6, link)))
    assert found["chosen"] in ("ring", "tree") and found["values"]["n"] == 8
    for entry in found["algorithms"]:
        value = eval(entry["formula"], {}, dict(found["values"]))
        assert value == pytest.approx(entry["seconds"])
    with pytest.raises(AutotpError, match="no collective is called 'reduce'"):
        explain_collective("reduce", topology, (64,), (0,), 1.0)
    command = ["explain", "all_gather", "--topology", "dgx-h100", "--devices", "16", "--bytes", "1 MB"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0 and "lambda_ring" in result.output and "chosen" in result.output
    assert json.loads(CliRunner().invoke(app, [*command, "--json"]).output)["collective"] == "all_gather"
    wrong = CliRunner().invoke(app, [*command, "--mesh", "2,8", "--axes", "q"])
    assert isinstance(wrong.exception, AutotpError)
