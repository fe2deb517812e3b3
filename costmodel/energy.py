"""What a step costs in energy and money: every device draws one power while it computes and another while it waits.

Symbols: **N** devices; **t_compute** seconds of a step in which each computes; **t_step** seconds of the whole step;
**P_busy** and **P_idle** watts that a device draws, with its share of the node, computing and waiting in a collective;
**c** price of one device-hour, in any currency.

Source: waiting is not free. arXiv 2411.13055 reports that from 128 to 2048 devices throughput per device falls by 37 % and
power by 6 % only, so that energy per token rises by about half: devices that wait in collectives draw nearly what busy ones
do. Two powers, each taken as constant, are the simplest model with that in it. A device is paid for whatever it does.
"""

from __future__ import annotations

import numpy as np
import sympy

from .device import Device
from .formula import Number, compile_formula

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
        device: what each of them is; its ``busy_power`` and ``idle_power`` are read, in watts.
        devices: how many.
        compute_seconds: seconds of the step in which each computes; in the rest it waits.
        step_seconds: seconds of the whole step.

    Returns:
        Joules, or None where the device's powers are not known.

    Raises:
        ValueError: a step is shorter than the compute in it.
    """
    _check(compute_seconds, step_seconds)
    if not _powers_known(device):
        return None
    return _energy(devices, compute_seconds, step_seconds, device.busy_power, device.idle_power)


def step_money(device: Device, devices: Number, step_seconds: Number) -> Number | None:
    """What one step costs on all devices, for one step or many at once; see `MONEY`.

    Args:
        device: what each of them is; its ``price`` of one device-hour is read.
        devices: how many.
        step_seconds: seconds of the whole step.

    Returns:
        An amount in the currency of ``price``, or None where the price is not known.
    """
    return _money(devices, step_seconds, device.price) if device.price else None


def per_token(amount: Number | None, tokens: Number) -> Number | None:
    """A step's energy or money for one of its tokens.

    Args:
        amount: of a whole step: joules, or an amount of money; None where it is not known.
        tokens: tokens (or samples) of a step, on all devices together.

    Returns:
        ``amount / tokens``, None where ``amount`` is.

    Raises:
        ValueError: ``tokens`` is not positive.
    """
    if np.any(np.asarray(tokens) <= 0):
        raise ValueError(f"tokens is {tokens!r}; a step has at least one")
    return None if amount is None else amount / tokens


def _powers_known(device: Device) -> bool:
    return device.busy_power > 0 and device.idle_power > 0


def _check(compute_seconds: Number, step_seconds: Number) -> None:
    # The parts of a step are summed in another order than the step itself: a rounding error is no mistake.
    if np.any(np.asarray(compute_seconds) > np.asarray(step_seconds) * (1 + 1e-9)):
        raise ValueError(f"compute_seconds is {compute_seconds!r}, more than step_seconds, {step_seconds!r}")
