"""Kinds: every operator that has one exists, and has only one."""

import pytest
import torch

from costmodel.machine.device import KINDS
from passes.rules.kinds import KERNELS
from passes.rules.table import RULES


@pytest.mark.parametrize("name", sorted(KERNELS))
def test_a_kernel_exists_and_has_no_rule(name):
    """A misspelled name would silently be "pointwise"; so would a name of another release of torch."""
    _, operator, overload = name.split(".")
    assert overload in getattr(torch.ops.aten, operator).overloads()
    assert name not in RULES


def test_kinds_are_those_that_machines_measure():
    assert {*KERNELS.values(), *(rule.kind for rule in RULES.values())} == set(KINDS)
