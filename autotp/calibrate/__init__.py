"""Measuring a machine: a topology whose figures are this job's.

Input: a job under torchrun. Output: a `Calibration` with a fitted topology. `job` runs the measurements in this order:
`collectives`, `kernels` by way of `device`, `contention`, and whole steps (`step`).
"""

from autotp.calibrate.job import Calibration, Check, LevelFit, calibrate, shape_of_job

__all__ = ["Calibration", "Check", "LevelFit", "calibrate", "shape_of_job"]
