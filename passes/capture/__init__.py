"""A model becomes a `Captured`: a functional graph of its forward pass in a canonical form.

Input: any ``torch.nn.Module`` with an example call; nothing of it is run. Output: a graph of out-of-place operators
with the names of its parameters and buffers and the `signature` of its call. `export` calls the others in this order:
functions with gradients of their own become operators (`autograd_functions`), what the model itself checkpoints is
marked (`checkpoints`), ``vmap`` is done (`vmaps`), regions are inlined (`regions`), writes become values (`writes`,
`view_writes`, `functional`), and every operator gets one spelling (`canonical`, `canonical_views`); `builder` writes
the nodes that these add. Under a precision, the model is captured as it runs with parameters cast (`precision`).
"""

from passes.capture.builder import CaptureError
from passes.capture.export import Captured, capture
from passes.capture.precision import PRECISIONS, Precision, policy_of, precision_name
from passes.capture.signature import CallSignature

__all__ = [
    "PRECISIONS",
    "CallSignature",
    "CaptureError",
    "Captured",
    "Precision",
    "capture",
    "policy_of",
    "precision_name",
]
