"""Fits the figures of a device to measured runs: few of them, so that they hold for runs that were not fitted.

The data sheet's rates stay. Fitted are the share of the peak that large products reach and the size that halves it, how
much slower fused attention is than that, how much slower than the memory's bandwidth everything else moves its bytes
(`costmodel.compute.KERNEL` has the formula), and how long the host takes to start a kernel (`costmodel.overlap.HOSTED`), of
which only runs with short kernels say much. The launch stays too: steps of large models do not depend on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from autotp.errors import AutotpError
from autotp.validate.predict import Accuracy, Prediction, accuracy
from costmodel import KINDS, Device

__all__ = ["DeviceFit", "fit_device", "parts"]

#: Figure -> least, greatest and first value.
_FIGURES = {
    "efficiency": (0.3, 1.0, 0.7),
    "half_size": (1.0, 3000.0, 200.0),
    "attention": (0.5, 10.0, 2.0),
    "memory": (1.1, 3.0, 1.25),
    "host": (1e-6, 3e-4, 1e-5),
}
_LEAST = 5  # runs for as many figures
_ROBUST = 0.05  # relative errors beyond which a run counts less
_HELD_OUT = 4  # every so many-th run is kept out of a fit
_FAR = 0.5  # mean relative error of a fit that says nothing of the device
_END = 1e-3  # relative; a figure that is as close to its least or greatest value is there


@dataclass(frozen=True, slots=True)
class DeviceFit:
    """A device with fitted figures.

    Attributes:
        device: with them.
        fitted, held_out: how far off predictions are with it, of the runs of the fit and of others.
        at_ends: figures that have the least or the greatest value that they may have, which the runs do not determine.
    """

    device: Device
    fitted: Accuracy
    held_out: Accuracy | None
    at_ends: tuple[str, ...]


def fit_device(predictions: Sequence[Prediction]) -> DeviceFit:
    """The device of some runs, with figures that make the relative errors of most of their steps smallest.

    Raises:
        AutotpError: the runs have different devices, are too few or are none of the device, or scipy is not installed.
    """
    devices = {one.run.topology.device.name: one.run.topology.device for one in predictions}
    if len(devices) != 1:
        raise AutotpError(f"runs on {', '.join(devices) or 'no device'} cannot be fitted together")
    (own,) = devices.values()
    chosen, others = parts(predictions)
    if len(chosen) < _LEAST:
        raise AutotpError(
            f"{len(predictions)} runs on {own.name} are too few: at least {_LEAST} are needed for {len(_FIGURES)} figures, "
            f"besides those that are held out (every {_HELD_OUT}th)"
        )
    try:
        from scipy.optimize import least_squares
    except ImportError as error:
        raise AutotpError("fitting needs scipy: pip install scipy") from error

    def errors(logarithms: np.ndarray) -> np.ndarray:
        device = _device(own, np.exp(logarithms))
        return np.log([one.work.seconds(device, own) / one.run.seconds for one in chosen])

    low, high, first = np.log(np.array(list(_FIGURES.values()))).T
    found = least_squares(errors, first, bounds=(low, high), loss="soft_l1", f_scale=_ROBUST, diff_step=1e-3)
    device = _device(own, [float(f"{figure:.3g}") for figure in np.exp(found.x)])

    def accurate(runs: Sequence[Prediction]) -> Accuracy:
        return accuracy([one.work.seconds(device, own) / one.run.seconds for one in runs])

    ranges = zip(_FIGURES, found.x, low, high, strict=True)
    ends = [name for name, at, *ends in ranges if np.isclose(at, ends, 0.0, _END).any()]
    fitted = accurate(chosen)
    if fitted.mean > _FAR:
        raise AutotpError(
            f"no {own.name} takes as long as these runs: fitted predictions are off by {fitted.mean:.0%} on average, with "
            f"{', '.join(ends) or 'no figure'} at an end of its range. Is step_seconds in seconds, and gpu_type the device?"
        )
    return DeviceFit(device, fitted, accurate(others) if others else None, tuple(ends))


def parts(predictions: Sequence[Prediction]) -> tuple[list[Prediction], list[Prediction]]:
    """Those of one device's runs that a fit uses, and every fourth, which it does not."""
    chosen = [one for number, one in enumerate(predictions) if (number + 1) % _HELD_OUT]
    return chosen, list(predictions[_HELD_OUT - 1 :: _HELD_OUT])


def _device(own: Device, figures: Sequence[float] | np.ndarray) -> Device:
    efficiency, half_size, attention, memory, host = (float(figure) for figure in figures)
    slowdown = dict.fromkeys(KINDS, memory) | {"product": 1.0, "convolution": 1.0, "attention": attention}
    return replace(own, efficiency=min(1.0, efficiency), half_size=half_size, slowdown=slowdown, host=host)
