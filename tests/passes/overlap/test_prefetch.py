"""When weights are gathered, and behind what the reductions of gradients are hidden."""

import pytest
import torch
from overlapping import prepared

import autotp
from autotp.analysis.trace import scheduled, trainable
from benchmarks.models import Transformer
from passes.capture import capture
from passes.graph import note_of
from passes.overlap.launch import launch, wait


@pytest.mark.parametrize("chunks", [{}, {"batch": 2}, {"rows": 2}])
def test_sharded_parameters_are_gathered_anew_for_the_backward_pass(chunks):
    """Each once, with chunks or without; otherwise they would be held whole from one pass to the other.

    These are the matrices of two blocks and of the head, and the blocks' norms.
    """
    made = prepared("zero3", (2,), chunks)[0]((0,))
    gathered = [note_of(n).collective for n in made.backward.nodes if n.target is launch and n.args[1] == "all_gather"]
    sources = [node.args[0] for node in gathered]
    while any(node.op != "placeholder" for node in sources):
        sources = [node if node.op == "placeholder" else node.all_input_nodes[0] for node in sources]
    assert len({node.name for node in sources}) == len(sources) == 9


def beneath(strategy):
    """Kind of collective -> number of products between each one's launch and wait, for the forward and backward pass."""
    model, x = Transformer(3, 256, 4), torch.randn(8, 64, 256)
    topology = autotp.Topology.flat(2, bandwidth="1 GB/s", latency="10 us")
    plan = autotp.plan(model, topology, (x,), strategy=strategy, mesh=(2,), chunks={})
    found = []
    for half in scheduled(capture(model, (x,)), plan, trainable(model)):
        nodes = [slot.node for slot in half]
        counts = {}
        for place, node in enumerate(nodes):
            if node.target is launch:
                (end,) = (nodes.index(user) for user in node.users if user.target is wait)
                under = sum("mm" in str(other.target) for other in nodes[place:end])
                counts.setdefault(node.args[1], []).append(under)
        found.append(counts)
    return found


def test_weights_are_gathered_ahead_and_their_gradients_reduced_behind():
    forward, backward = beneath("zero3")
    for counts in (forward["all_gather"], backward["all_gather"], backward["reduce_scatter"]):
        hidden = [count for count in counts if count >= 2]
        assert len(hidden) >= len(counts) / 2 and max(counts) >= 4, counts


def test_gradients_of_inputs_are_reduced_under_the_products_of_weights():
    _, backward = beneath("megatron-1d")
    assert len(backward["all_reduce"]) >= 5 and min(backward["all_reduce"]) >= 1, backward
