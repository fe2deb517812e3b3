"""A model becomes a `Captured`: a functional graph of its forward pass in a canonical form.

Input: any ``torch.nn.Module`` with an example call, which is not run, and a `precision`; output: a graph of out-of-place
operators with the `signature` of its call. `export` calls the others in this order: what cannot be captured is refused
(`checks`), functions with their own gradients and transforms become operators (`autograd_functions`), the model's
checkpoints are marked (`checkpoints`), what observed modules are given and return is noted (`observed`), and what the model
changes in Python (`attributes`), assertions are left out, regions are inlined (`regions`), writes become values (`writes`,
`view_writes`, `functional`), operators become canonical (`canonical`, `canonical_views`), and masks that say no more than
"causal" become that (`masks`). The nodes that these add are made by `builder`.
"""

from passes.capture.attributes import Left, buffered, placed
from passes.capture.builder import CaptureError
from passes.capture.checks import require_call, require_plain
from passes.capture.export import Captured, capture
from passes.capture.observed import Moment, foreign_hooks, matching
from passes.capture.precision import PRECISIONS, Precision, policy_of, precision_name
from passes.capture.signature import CallSignature

__all__ = [
    "PRECISIONS",
    "CallSignature",
    "CaptureError",
    "Captured",
    "Left",
    "Moment",
    "Precision",
    "buffered",
    "capture",
    "foreign_hooks",
    "matching",
    "placed",
    "policy_of",
    "precision_name",
    "require_call",
    "require_plain",
]
