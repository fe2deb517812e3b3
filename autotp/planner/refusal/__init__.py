"""Why a job does not fit, and which changes would make it fit.

Input: the contest that found nothing, and the plan with the least memory. Output: a ``MemoryBoundError`` (`error`).
`changes` tries single changes of the job. For each, it uses the same bounds and the same search for the plan with the least
memory as the planner itself.
"""

from autotp.planner.refusal.changes import Job, Recapture, part_of
from autotp.planner.refusal.error import nothing_fits

__all__ = ["Job", "Recapture", "nothing_fits", "part_of"]
