"""Why a job does not fit, and what would make it.

Input: the contest that found nothing, and the plan with the least memory. Output: a ``MemoryBoundError`` (`error`).
`changes` tries single changes of the job, each by the bounds and the plan with the least memory that the planner itself
goes by.
"""

from autotp.planner.refusal.changes import Job, Recapture, part_of
from autotp.planner.refusal.error import nothing_fits

__all__ = ["Job", "Recapture", "nothing_fits", "part_of"]
