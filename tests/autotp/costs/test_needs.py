"""Saved tensors and temporary memory of collectives, by hand and compared with traced graphs."""

from __future__ import annotations

import math

import pytest
import torch
from overlapping import traced
from thinned import thinned
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.utils._python_dispatch import TorchDispatchMode

import autotp
from autotp.analysis.explain import priced_plan
from autotp.costs.footprint import Footprint
from autotp.costs.gradients import Gradients
from autotp.costs.needs import BESIDES, Needs
from autotp.costs.transit import gathers, in_transit, sums_in_place
from benchmarks.models import trained
from passes.capture import capture
from passes.graph import note_of
from passes.rules.kept import in_turn
from passes.rules.table import rule_of

WHOLE, SUMS, ROWS, COLUMNS = (Replicate(),), (Partial(),), (Shard(0),), (Shard(1),)
SHAPE, MESH, ALL = (8, 12), (4,), 96


@pytest.mark.parametrize(
    ("source", "target", "stays", "scheduled", "most"),
    [
        (ROWS, WHOLE, True, True, 0),
        (COLUMNS, WHOLE, True, True, ALL),  # the buffer in which the blocks are joined
        (COLUMNS, WHOLE, False, True, ALL - ALL // 4),  # the part has been freed by then
        (SUMS, COLUMNS, False, True, ALL - ALL // 4),  # the copied blocks, before the sum exists
        (SUMS, COLUMNS, True, False, ALL),  # the operand and its copied blocks exist with the sum
        (SUMS, ROWS, False, True, 0),
        (WHOLE, ROWS, True, True, 0),
        (ROWS, ROWS, True, True, 0),
    ],
)
def test_what_a_collective_holds_besides_what_it_is_given_and_gives(source, target, stays, scheduled, most):
    assert in_transit(SHAPE, source, target, MESH, stays, scheduled) == most


def test_what_is_gathered_again_and_summed_in_place():
    assert gathers(SHAPE, ROWS, WHOLE, MESH)
    assert not gathers(SHAPE, WHOLE, ROWS, MESH)
    assert sums_in_place(SHAPE, SUMS, WHOLE, MESH)
    assert not sums_in_place(SHAPE, SUMS, ROWS, MESH)


def test_gradients_share_memory_until_one_is_added_to():
    peaks = []
    found = Gradients(lambda passing: peaks.append(found.total + passing))
    found.arrive("sum", 10.0)
    found.arrive("a", 10.0, "sum")
    found.arrive("b", 10.0, "sum")
    found.fall("sum")
    assert found.total == 10
    found.arrive("a", 10.0)  # b still uses that memory
    assert found.total == 20
    assert max(peaks) == 30
    found.arrive("a", 10.0)
    assert found.total == 20
    found.fall("a")
    found.fall("b")
    assert found.total == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "family", "mesh", "recompute"),
    thinned(
        [
            ("gpt", "megatron-sp", (2, 2), "none"),
            ("gpt", "zero3", (4,), "full"),
            ("gpt", "summa-2d", (2, 2), "selective"),
            ("unet", "tensor3d", (2, 2), "selective"),
            ("vit", "megatron-1d", (2, 2), "none"),
        ],
        3,
    ),
)
def test_what_is_kept_is_what_the_traced_graphs_hand_over(name, family, mesh, recompute):
    model, args = trained(name)
    topology = autotp.Topology.load("dgx-h100").resized(math.prod(mesh))
    plan = autotp.plan(model, topology, args, strategy=family, mesh=mesh, recompute=recompute)
    backward = traced(model, args, plan).cut.backward
    handed = math.fsum(note_of(node).held for node in backward.nodes if node.op == "placeholder")
    walked = Footprint(priced_plan(capture(model, args), plan))
    needs, found = Needs(walked.priced, walked.storages), 0.0
    for (node, number), layout in needs.kept:
        if number == BESIDES:
            found += walked.parts(node, needs.besides[node])
        elif node.op != "placeholder" or layout != walked.layouts[node, number]:  # placeholders at rest are not counted
            found += walked.bytes(walked.model.named[node, number].meta["val"], layout)
    assert found == pytest.approx(handed, rel=0.01)


def test_what_is_not_needed_to_compute_again_is_not_kept():
    """Of partial summands that are added up by a collective, only the sum is saved."""
    model, args = trained("unet")
    topology = autotp.Topology.load("dgx-h100").resized(4)
    plan = autotp.plan(model, topology, args, strategy="tensor3d", mesh=(2, 2), recompute="selective")
    walked = Footprint(priced_plan(capture(model, args), plan))
    needs = Needs(walked.priced, walked.storages)
    kept = [layout for (node, number), layout in needs.kept if node.op != "placeholder" and number != BESIDES]
    assert kept and not any(isinstance(placement, Partial) for layout in kept for placement in layout)


class _Reads(TorchDispatchMode):
    """Records the address of each operand that products read, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[int] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in {torch.ops.aten.mm.default, torch.ops.aten.bmm.default, torch.ops.aten.mul.Tensor}:
            self.found += [t.data_ptr() for t in args]
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("function", "shapes"),
    [
        (torch.nn.functional.linear, [(2, 7, 3), (5, 3)]),
        (torch.nn.functional.linear, [(2, 7, 3), (5, 3), (5,)]),
        (torch.mm, [(7, 3), (3, 5)]),
        (torch.bmm, [(2, 7, 3), (2, 3, 5)]),
        (torch.matmul, [(2, 7, 3), (2, 3, 5)]),
        (torch.mul, [(2, 7), (2, 7)]),
        (torch.addmm, [(5,), (7, 3), (3, 5)]),
        (torch.baddbmm, [(2, 7, 5), (2, 7, 3), (2, 3, 5)]),
    ],
)
def test_gradients_are_made_in_autograds_order(function, shapes):
    class Model(torch.nn.Module):
        def forward(self, *operands):
            return function(*operands)

    operands = [torch.randn(shape, requires_grad=True) for shape in shapes]
    (node,) = (n for n in capture(Model(), operands).graph_module.graph.nodes if n.op == "call_function" and rule_of(n))
    order = [i for i in in_turn(node) if i not in rule_of(node).additive]
    result = function(*operands)
    with _Reads() as reads:
        result.backward(torch.ones_like(result))
    read = [i for pointer in reads.found for i in order if operands[i].data_ptr() == pointer]
    assert read == [i for mine in order for i in order if i != mine]
