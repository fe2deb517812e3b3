"""With mixed precision, the integer program's objective equals the seconds of its plan: both price the same dtypes."""

import pytest
from models import MODELS
from thinned import thinned

import autotp
from autotp.costs.priced import Priced
from autotp.costs.prices import Prices
from autotp.planner import prepare
from autotp.planner.assemble import assemble
from autotp.planner.ilp import Deadline, cheapest, evaluate
from autotp.planner.structure import structure
from autotp.plans.families import family
from costmodel import Device
from passes.capture import capture

_DEVICE = Device("halves", {"float32": 1e7, "bfloat16": 2e7}, 1e12, 1e7, 0.0)


@pytest.mark.slow
@pytest.mark.parametrize("precision", [None, "bf16-mixed", "reduce_dtype=bfloat16"])
@pytest.mark.parametrize("name", thinned(["zero3", "auto"], whole=True))
def test_the_program_counts_what_the_plan_costs(precision, name):
    model, args, kwargs = MODELS["llama"]()
    captured = capture(model, args, kwargs, precision)
    analysed = prepare(captured)
    prices = Prices(autotp.Topology.flat(4, bandwidth=1e9, latency=1e-6, device=_DEVICE), (2, 2))
    built = structure(analysed, family(name).restrictions(2)[0], 2)
    assembled = assemble(built, prices)
    choice = cheapest(assembled.problem, Deadline())

    def chosen(node):
        stand = analysed.stands.get(node, node)
        return assembled.chosen(stand, choice[built.index[stand]])

    strategies = {node.name: chosen(node) for node in analysed.operators}
    given = captured.graph_module.graph.find_nodes(op="placeholder")
    resting = {node.name: chosen(node) for node in given if node.name in captured.parameters}
    rematerialized = assembled.rematerialized(choice)
    once = [node.name for node in given if analysed.stands.get(node, node) not in rematerialized]
    sums = Priced.of(analysed, prices, strategies, resting, {}, [], once).sums
    assert evaluate(assembled.problem, choice).seconds == pytest.approx(sums.compute + sums.communication, rel=1e-9)
