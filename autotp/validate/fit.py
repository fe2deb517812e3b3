"""Fits some figures of a device to measured runs: only a few, so that they also hold for runs that were not fitted.

The rates of the data sheet are kept. The fit determines the share of the peak that large products reach, the size that
halves it, the slowdown of fused attention relative to that, the slowdown of all other operators relative to the memory
bandwidth (`costmodel.compute.KERNEL` has the formula), and the host's seconds to start a kernel
(`costmodel.overlap.HOSTED`), which only runs with short kernels determine well. The launch is kept, too: steps of large
models do not depend on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from autotp.errors import AutotpError
from autotp.validate.predict import Accuracy, Prediction, accuracy
from costmodel import KINDS, Device

__all__ = ["DeviceFit", "fit_device", "parts"]

#: Figure -> lower bound, upper bound and initial value.
_FIGURES = {
    "efficiency": (0.3, 1.0, 0.7),
    "half_size": (1.0, 3000.0, 200.0),
    "attention": (0.5, 10.0, 2.0),
    "memory": (1.1, 3.0, 1.25),
    "host": (1e-6, 3e-4, 1e-5),
}
_LEAST = 5  # the fewest runs: as many as figures
_ROBUST = 0.05  # the relative error beyond which a run has less weight
_HELD_OUT = 4  # one of this many runs is held out of a fit
_FAR = 0.5  # the mean relative error beyond which a fit is rejected
_END = 1e-3  # the relative distance up to which a figure counts as at its bound


@dataclass(frozen=True, slots=True)
class DeviceFit:
    """A device with fitted figures.

    Attributes:
        device: the device with the fitted figures.
        fitted, held_out: the accuracy of predictions with it, for the runs of the fit and for the held-out runs, if any.
        at_ends: figures at a bound of their range, which the runs therefore do not determine.
    """

    device: Device
    fitted: Accuracy
    held_out: Accuracy | None
    at_ends: tuple[str, ...]


def fit_device(predictions: Sequence[Prediction]) -> DeviceFit:
    """Fits the device of some runs to them: minimizes the relative errors of step times, with less weight for outliers.

    Raises:
        AutotpError: the runs have different devices, are too few or cannot be of the device, or scipy is not installed.
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
    """The runs that a fit uses, and those that are held out (every fourth), of the runs on one device."""
    chosen = [one for number, one in enumerate(predictions) if (number + 1) % _HELD_OUT]
    return chosen, list(predictions[_HELD_OUT - 1 :: _HELD_OUT])


def _device(own: Device, figures: Sequence[float] | np.ndarray) -> Device:
    efficiency, half_size, attention, memory, host = (float(figure) for figure in figures)
    slowdown = dict.fromkeys(KINDS, memory) | {"product": 1.0, "convolution": 1.0, "attention": attention}
    return replace(own, efficiency=min(1.0, efficiency), half_size=half_size, slowdown=slowdown, host=host)
