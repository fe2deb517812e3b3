"""autotp: an unmodified PyTorch model and a description of the cluster become a distributed ``torch.fx.GraphModule``."""

from autotp.checkpoint import storable
from autotp.errors import AutotpError, BatchError, ConstraintError, MemoryBoundError, PlanMismatchError, TimeLimitError
from autotp.families import FAMILIES
from autotp.logs import switch_on
from autotp.module import DistributedModule
from autotp.parallelize import parallelize
from autotp.plan import Plan, PlannedOperator, Predicted
from autotp.planner import plan
from autotp.simulate import simulate
from autotp.verify import Verification, verify
from costmodel import Topology

__version__ = "0.1.0"

switch_on()

__all__ = [
    "FAMILIES",
    "AutotpError",
    "BatchError",
    "ConstraintError",
    "DistributedModule",
    "MemoryBoundError",
    "Plan",
    "PlanMismatchError",
    "PlannedOperator",
    "Predicted",
    "TimeLimitError",
    "Topology",
    "Verification",
    "parallelize",
    "plan",
    "simulate",
    "storable",
    "verify",
]
