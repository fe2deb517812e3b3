"""Passes run in the order that the docstring of `passes` gives."""

import importlib
import re
import sys

import torch
from devices import slow_machine
from overlapping import prepared
from torch import nn

import autotp
import passes
from passes.overlap.pipeline import BACKWARD_PASSES, PASSES
from passes.world.world import LocalWorld

MACHINE = slow_machine((4,))
LISTED = re.findall(r"^\d+\. `(.+?)`:", passes.__doc__, re.MULTILINE)


def code_of(name):
    module, _, function = name.rpartition(".")
    return getattr(importlib.import_module(module), function).__code__


class LastCalls:
    """Records the listed passes in the order of their last calls within the context: earlier calls may be trials."""

    def __init__(self):
        self.names, self.codes = [], {code_of(name): name for name in LISTED}

    def __enter__(self):
        sys.setprofile(self._called)
        return self.names

    def __exit__(self, *_):
        sys.setprofile(None)

    def _called(self, frame, event, _):
        name = self.codes.get(frame.f_code) if event == "call" else None
        if name is not None:
            self.names[:] = [other for other in self.names if other != name] + [name]


def passes_of(model, x, strategy, schedule, **options):
    """The passes that run when a plan is simulated, forward and backward."""
    plan = autotp.plan(model, MACHINE, (x,), strategy=strategy, mesh=(2, 2), **options)
    with LastCalls() as called:
        autotp.simulate(model, plan, (x,), schedule=schedule)(x).square().sum().backward()
    return called


def test_passes_run_in_the_order_that_is_documented():
    images = nn.Sequential(nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 8, 3, padding=1))
    overlapped = passes_of(images, torch.randn(8, 8, 8, 8), "data", "overlap", chunks={"batch": 2})
    layers = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
    panelled = passes_of(layers, torch.randn(16, 16), "summa-2d", "none", panels=2)
    for called in (overlapped, panelled):
        assert called == [name for name in LISTED if name in called]
    graphs, _ = prepared()
    made = graphs((0,))
    with LastCalls() as compiled:
        made.modules(made.first_orders, LocalWorld((2,)), lambda graph: nn.Identity())
    assert compiled == [name for name in LISTED if name in compiled]
    assert {*overlapped, *panelled, *compiled} == set(LISTED)
    assert {f"{each.__module__}.{each.__name__}" for each in (*BACKWARD_PASSES, *PASSES)} <= set(LISTED)
