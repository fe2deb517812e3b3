"""Captures a model as a `Captured`: a functional graph of its forward pass in a canonical form.

Input: any ``torch.nn.Module`` with an example call, which is not executed, and a `precision`; output: a graph of
out-of-place operators with the `signature` of its call. `export` calls the other modules in this order: models that cannot
be captured are refused (`checks`), custom autograd functions and transforms become operators (`autograd_functions`), the
model's checkpoints are marked (`checkpoints`), inputs and outputs of observed modules are recorded (`observed`), and
changes to Python state (`attributes`), assertions are removed, regions are inlined (`regions`), in-place writes become new
values (`writes`, `view_writes`, `functional`), operators become canonical (`canonical`, `canonical_views`), and causal
masks become ``is_causal`` (`masks`). `builder` makes the nodes that these add.
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
