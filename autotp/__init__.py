"""autotp turns an unmodified PyTorch model and a description of a cluster into a distributed ``torch.fx.GraphModule``.

The `planner` chooses a plan (`plans`) by its predicted cost (`costs`), the `runtime` applies it to the model, `analysis`
explains and checks it, `calibrate` measures the machine, `integrations` support other frameworks, and `validate` compares
predictions with measured runs. `cli` is the command line; all of them use `errors` and `logs`.
"""

from autotp.analysis.verify import Verification, verify
from autotp.errors import (
    AutotpError,
    BatchError,
    CollectiveError,
    ConstraintError,
    MemoryBoundError,
    PlanMismatchError,
    TimeLimitError,
)
from autotp.logs import switch_on
from autotp.planner import plan
from autotp.plans.families import FAMILIES
from autotp.plans.plan import Plan, PlannedOperator, Predicted
from autotp.runtime.checkpoint.load import load_pretrained
from autotp.runtime.checkpoint.random_state import RandomState
from autotp.runtime.checkpoint.save import save_pretrained
from autotp.runtime.checkpoint.sharded import checkpoint_blocks, redistribute, storable
from autotp.runtime.module import DistributedModule
from autotp.runtime.parallelize import parallelize
from autotp.runtime.simulate import simulate
from costmodel import Topology

__version__ = "0.1.0"

switch_on()
checkpoint_blocks()

__all__ = [
    "FAMILIES",
    "AutotpError",
    "BatchError",
    "CollectiveError",
    "ConstraintError",
    "DistributedModule",
    "MemoryBoundError",
    "Plan",
    "PlanMismatchError",
    "PlannedOperator",
    "Predicted",
    "RandomState",
    "TimeLimitError",
    "Topology",
    "Verification",
    "load_pretrained",
    "parallelize",
    "plan",
    "redistribute",
    "save_pretrained",
    "simulate",
    "storable",
    "verify",
]
