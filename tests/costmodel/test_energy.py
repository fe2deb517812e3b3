"""Energy and money for a step."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from costmodel import Device, Topology
from costmodel.energy import per_token, step_energy, step_money

DEVICE = Device("x", {"float32": 1e12}, 1e9, 1e9, 0.0, idle_power=300.0, busy_power=500.0, price=2.0)


def test_energy_is_busy_and_waiting_power():
    assert step_energy(DEVICE, 4, 3.0, 5.0) == pytest.approx(4 * (500 * 3 + 300 * 2))
    assert step_energy(DEVICE, 1, 5.0, 5.0) == pytest.approx(2500)


def test_money_is_device_hours():
    assert step_money(DEVICE, 8, 3600.0) == pytest.approx(16.0)
    assert per_token(step_money(DEVICE, 8, 3600.0), 4) == pytest.approx(4.0)


def test_many_steps_at_once():
    steps = np.array([1.0, 2.0, 4.0])
    found = step_energy(DEVICE, np.array([1, 2, 4]), steps / 2, steps)
    assert found == pytest.approx(np.array([1, 2, 4]) * steps * 400)
    assert per_token(found, 100) == pytest.approx(found / 100)
    assert step_money(DEVICE, 1, steps) == pytest.approx(steps * 2 / 3600)


def test_not_known():
    cpu = Topology.load("cpu").device
    assert step_energy(cpu, 4, 1.0, 2.0) is None
    assert step_money(cpu, 4, 2.0) is None and per_token(None, 10) is None
    assert step_energy(dataclasses.replace(DEVICE, idle_power=0.0), 1, 1.0, 1.0) is None


def test_wrong_figures():
    with pytest.raises(ValueError, match="more than step_seconds"):
        step_energy(DEVICE, 1, 2.0, 1.0)
    with pytest.raises(ValueError, match="at least one"):
        per_token(1.0, 0)
    assert step_energy(DEVICE, 1, 0.1 + 0.2, 0.3) == pytest.approx(150)  # a rounding error is accepted


@pytest.mark.parametrize("name", [name for name in Topology.preset_names() if name != "cpu"])
def test_presets_give_powers(name):
    """An idle device draws 0.84 of the power of a busy one, and its share of the node's power at all times."""
    device = Topology.load(name).device
    assert 0.84 <= device.idle_power / device.busy_power + 0.002 < 1


def test_waiting_costs_energy():
    """arXiv 2411.13055 reports 37 % less throughput for 6 % less power, which is about 50 % more energy per token."""
    busy = dataclasses.replace(DEVICE, busy_power=700.0, idle_power=0.84 * 700)
    assert step_energy(busy, 1, 0.63, 1.0) / step_energy(busy, 1, 1.0, 1.0) == pytest.approx(0.94, abs=0.002)
    assert step_energy(busy, 1, 1.0, 1 / 0.63) / step_energy(busy, 1, 1.0, 1.0) == pytest.approx(1.49, abs=0.01)
