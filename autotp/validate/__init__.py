"""Measured training runs against predictions: what comes in is a table of runs, what goes out is how far off plans are.

`runs` reads a table, `models` has the architectures of such runs, `predict` plans every run as it was run and compares, and
`fit` fits a device's figures to them.
"""

from autotp.validate.fit import DeviceFit, fit_device, parts
from autotp.validate.predict import (
    Accuracy,
    Prediction,
    Ranking,
    accuracy,
    by_source,
    kendall,
    predicted,
    predicted_all,
    rankings,
)
from autotp.validate.runs import MeasuredRun, Skipped, read_runs

__all__ = [
    "Accuracy",
    "DeviceFit",
    "MeasuredRun",
    "Prediction",
    "Ranking",
    "Skipped",
    "accuracy",
    "by_source",
    "fit_device",
    "kendall",
    "parts",
    "predicted",
    "predicted_all",
    "rankings",
    "read_runs",
]
