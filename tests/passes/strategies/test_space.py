"""The strategies of an operator: which of its assignments exist on a mesh, and the resulting layouts."""

import itertools
import math

import pytest
from models import MODELS
from torch.distributed.tensor import Replicate

from autotp.planner import prepare
from passes.capture import capture
from passes.layouts.codes import fits
from passes.layouts.layout import splits
from passes.rules.shapes import operands_of, results_of
from passes.rules.table import rule_of
from passes.strategies.space import space, strategies, uneven_matters


def exists(operator, strategy, mesh):
    if any(name and size == 1 for name, size in zip(strategy.assignment, mesh, strict=True)):
        return False
    for factor in (operator.factors.get(name or "") for name in set(strategy.assignment)):
        if factor is not None:
            ways = math.prod(mesh[axis] for axis in strategy.axes(factor.name))
            if factor.size % ways and (not factor.sole or factor.base in uneven_matters(operator)):
                return False
    outputs = list(zip(results_of(operator.node), strategy.results, strict=True))
    shaped = [(n.meta["val"], w.layout) for n, w in zip(operands_of(operator.node), strategy.wants, strict=True)] + outputs
    if not all(fits(tuple(tensor.shape), layout, mesh) for tensor, layout in shaped):
        return False
    table = rule_of(operator.node)
    if table is None or table.shape is None:
        return True
    shape, layout = tuple(outputs[0][0].shape), outputs[0][1]
    cut = [math.prod(mesh[part.axis] for part in splits(layout, dim, mesh)) for dim in range(len(shape))]
    return sum(size % ways != 0 for size, ways in zip(shape, cut, strict=True)) <= 1


@pytest.mark.parametrize("name", ["gpt2", "unet"])
def test_those_strategies_exist_whose_factors_divide_and_whose_layouts_fit(name):
    """Checks each assignment of one operator of each kind by itself."""
    model, args, kwargs = MODELS[name]()
    operators = {str(node.target): op for node, op in prepare(capture(model, args, kwargs)).operators.items()}
    for mesh, operator in itertools.product([(2, 2), (3, 2), (4, 1)], operators.values()):
        every = space(operator, len(mesh))
        found = [every.strategy(row) for row in range(len(every.serves))]
        expected = [strategy for strategy in found if exists(operator, strategy, mesh)]
        assert list(strategies(operator, mesh)) == expected, operator.node
        assert set(expected[0].assignment) == {None}
        assert all(layout == (Replicate(),) * len(mesh) for layout in expected[0].results)
