"""Plans one captured model by every family, for the tables that compare families."""

from __future__ import annotations

from autotp import FAMILIES, BatchError, MemoryBoundError, Plan
from autotp.planner import plan_captured
from autotp.plans.families import family
from autotp.plans.options import Options
from costmodel import Topology
from passes.capture import Captured

__all__ = ["plans"]


def plans(captured: Captured, topology: Topology, memory: float | None, mode: str = "train") -> dict[str, Plan | str]:
    """Family -> its plan, or a text that says why there is none.

    A family has no plan if the number of devices does not allow the mesh axes that its name implies (3D on 25 devices).
    """
    found: dict[str, Plan | str] = {}
    for name in FAMILIES:
        chosen = family(name)
        try:
            plan = plan_captured(
                captured, topology, Options(chosen, memory=memory, mode=mode, time_limit=60.0, schedule="none")
            )
        except MemoryBoundError:
            found[name] = "does not fit"
        except BatchError:
            found[name] = "batch too small"
        else:
            found[name] = plan if len(plan.mesh_shape) >= chosen.least else "no such mesh"
    return found
