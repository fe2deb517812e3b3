"""``AUTOTP_LOGS``: which logs it enables, and that nothing is logged without it."""

import logging
import os
import subprocess
import sys

import pytest

PROGRAM = """
import torch, autotp
model, x = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU()), torch.randn(4, 8)
plan = autotp.plan(model, autotp.Topology.flat(2), (x,), strategy="data")
autotp.simulate(model, plan, (x,), schedule="overlap")(x).sum().backward()
"""


def said(switch):
    environment = {**os.environ, "AUTOTP_LOGS": switch}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=True)
    assert not done.stdout
    return done.stderr


@pytest.mark.slow
def test_silence_is_the_default():
    assert "autotp" not in said("")


@pytest.mark.slow
def test_what_is_asked_for_is_said():
    text = said("plan,+passes")
    assert "autotp.plan INFO: data on 2 devices" in text
    stages = [line for line in text.splitlines() if line.startswith("autotp.passes DEBUG")]
    assert [stage.split(": ")[1] for stage in stages][:2] == ["captured", "sharded"]
    assert any("scheduled" in stage for stage in stages) and "def forward" in text


@pytest.mark.exact
def test_an_unknown_name_is_reported():
    assert "'plans' is unknown; choose of plan, passes, schedule" in said("plans")


@pytest.fixture
def untouched():
    loggers = [logging.getLogger(name) for name in ("autotp", "autotp.plan", "autotp.passes", "autotp.schedule")]
    before = [(logger, logger.level, list(logger.handlers), logger.propagate) for logger in loggers]
    yield
    for logger, level, handlers, propagate in before:
        logger.setLevel(level)
        logger.handlers, logger.propagate = handlers, propagate


def test_levels(untouched):
    from autotp.logs import switch_on

    switch_on("plan,+passes,-schedule")
    levels = [logging.getLogger(f"autotp.{name}").level for name in ("plan", "passes", "schedule")]
    assert levels == [logging.INFO, logging.DEBUG, logging.ERROR]
