"""Calibration: fits a topology to measurements of the machine that this job runs on.

Input: a job under torchrun. Output: a `Calibration` with a fitted topology. `job` runs the measurements in this order:
`collectives`, `contention`, `kernels` (through `device`), and whole steps (`step`).
"""

from autotp.calibrate.job import Calibration, Check, LevelFit, calibrate, shape_of_job
from autotp.calibrate.step import StepFit

__all__ = ["Calibration", "Check", "LevelFit", "StepFit", "calibrate", "shape_of_job"]
