"""The energy and the price of a step: every device draws one power while it computes and another while it waits.

Symbols: **N** devices; **t_compute** seconds of a step in which each device computes; **t_step** seconds of the whole step;
**P_busy** and **P_idle** watts that a device draws, including its share of the node, while it computes and while it waits
in a collective; **c** price of one device-hour, in any currency.

Source: arXiv 2411.13055 reports that from 128 to 2048 devices, throughput per device falls by 37 %, but power by only 6 %.
Energy per token rises by about half: devices that wait in collectives draw nearly as much power as busy ones. Two constant
powers are the simplest model of this. The price of a device does not depend on what it does.
"""

from __future__ import annotations

import numpy as np
import sympy

from .formula import Number, compile_formula
from .machine.device import Device

__all__ = ["ENERGY", "MONEY", "per_token", "step_energy", "step_money"]

N, c = sympy.symbols("N c", positive=True)
t_compute, t_step, P_busy, P_idle = sympy.symbols("t_compute t_step P_busy P_idle", nonnegative=True)

_HOUR = 3600  # seconds

ENERGY: sympy.Expr = N * (P_busy * t_compute + P_idle * (t_step - t_compute))
"""Joules of one step of all devices."""

MONEY: sympy.Expr = N * c * t_step / _HOUR
"""Price of one step of all devices, in the currency of c."""

_energy = compile_formula((N, t_compute, t_step, P_busy, P_idle), ENERGY)
_money = compile_formula((N, t_step, c), MONEY)


def step_energy(device: Device, devices: Number, compute_seconds: Number, step_seconds: Number) -> Number | None:
    """Joules that one step takes on all devices, for one step or many at once; see `ENERGY`.

    Args:
        device: the kind of device; its ``busy_power`` and ``idle_power`` are used, in watts.
        devices: the number of devices.
        compute_seconds: seconds of the step in which each device computes; in the rest, it waits.
        step_seconds: seconds of the whole step.

    Returns:
        Joules, or None if the device's powers are unknown.

    Raises:
        ValueError: a step is shorter than its computation.
    """
    _check(compute_seconds, step_seconds)
    if not _powers_known(device):
        return None
    return _energy(devices, compute_seconds, step_seconds, device.busy_power, device.idle_power)


def step_money(device: Device, devices: Number, step_seconds: Number) -> Number | None:
    """The price of one step on all devices, for one step or many at once; see `MONEY`.

    Args:
        device: the kind of device; its ``price`` of one device-hour is used.
        devices: the number of devices.
        step_seconds: seconds of the whole step.

    Returns:
        An amount in the currency of ``price``, or None if the price is unknown.
    """
    return _money(devices, step_seconds, device.price) if device.price else None


def per_token(amount: Number | None, tokens: Number) -> Number | None:
    """A step's energy or price per token.

    Args:
        amount: joules or money for a whole step; None if unknown.
        tokens: tokens (or samples) of a step, on all devices together.

    Returns:
        ``amount / tokens``, or None if ``amount`` is None.

    Raises:
        ValueError: ``tokens`` is not positive.
    """
    if np.any(np.asarray(tokens) <= 0):
        raise ValueError(f"tokens is {tokens!r}; a step has at least one")
    return None if amount is None else amount / tokens


def _powers_known(device: Device) -> bool:
    return device.busy_power > 0 and device.idle_power > 0


def _check(compute_seconds: Number, step_seconds: Number) -> None:
    # The parts of a step are summed in a different order than the step itself, so rounding errors are allowed for.
    if np.any(np.asarray(compute_seconds) > np.asarray(step_seconds) * (1 + 1e-9)):
        raise ValueError(f"compute_seconds is {compute_seconds!r}, more than step_seconds, {step_seconds!r}")
