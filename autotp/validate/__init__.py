"""Validation: compares predictions with measured training runs.

Input: a table of runs. Output: the errors of the predictions. `runs` reads a table, `models` has the architectures of the
runs, `predict` plans every run as it was run and compares, and `fit` fits a device's figures to runs.
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
