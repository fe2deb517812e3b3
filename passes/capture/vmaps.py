"""``torch.vmap`` inside a model: operators on one element become operators on all.

Export records where a vmap begins and ends, and operators on single elements in between. A planner needs them as they run,
so each such stretch is traced with the vmap carried out. Of derivatives that a model takes forward, only their ends would
be in the graph.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx, nn
from torch._functorch import predispatch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from passes.capture.builder import CaptureError
from passes.graph import where

__all__ = ["without_vmaps"]

_BEGIN, _END = predispatch._vmap_increment_nesting, predispatch._vmap_decrement_nesting


def without_vmaps(graph: fx.Graph, mode: FakeTensorMode) -> fx.Graph:
    """The same graph with its vmaps done; itself where it has none.

    Args:
        graph: as export makes it; nodes have fake values of ``mode``.
        mode: of these values.

    Raises:
        CaptureError: the model takes derivatives forward.
    """
    for node in graph.nodes:
        if node.target in (predispatch._make_dual, predispatch._unpack_dual):
            raise CaptureError(
                f"{where(node)}: torch.func.jvp inside forward has no graph; compute the derivative yourself"
            )
    if not any(node.target is _BEGIN for node in graph.nodes):
        return graph
    result = fx.Graph()
    values: dict[fx.Node, fx.Node] = {}
    stretch: list[fx.Node] = []
    depth = 0
    for node in graph.nodes:
        depth += node.target is _BEGIN
        if depth:
            stretch.append(node)
        elif node.target is not predispatch.lazy_load_decompositions:
            values[node] = result.node_copy(node, lambda n: values[n])
        depth -= node.target is _END
        if stretch and not depth:
            _done(result, stretch, values, mode)
            stretch = []
    return result


def _done(result: fx.Graph, stretch: Sequence[fx.Node], values: dict[fx.Node, fx.Node], mode: FakeTensorMode) -> None:
    """Puts a stretch into the graph, done for all elements."""
    inside = set(stretch)
    given = list(dict.fromkeys(n for node in stretch for n in node.all_input_nodes if n not in inside))
    taken = [node for node in stretch if any(user not in inside for user in node.users)]
    if not taken:
        return
    part, own = fx.Graph(), {}
    for node in given:
        own[node] = part.placeholder(node.name)
    for node in stretch:
        own[node] = part.node_copy(node, lambda n: own[n])
    part.output([own[node] for node in taken])
    with mode:
        shown = [node.meta["val"] for node in given]
        traced = make_fx(torch.func.functionalize(make_fx(fx.GraphModule(nn.Module(), part))(*shown)))(*shown)
    known = dict(zip((n for n in traced.graph.nodes if n.op == "placeholder"), (values[n] for n in given), strict=True))
    origin = taken[0].meta
    for node in traced.graph.nodes:
        if node.op == "output":
            for old, new in zip(taken, node.args[0], strict=True):
                values[old] = known[new]
        elif node.op != "placeholder":
            known[node] = result.node_copy(node, lambda n: known[n])
            known[node].meta = {key: value for key, value in origin.items() if key != "val"} | {"val": node.meta["val"]}
