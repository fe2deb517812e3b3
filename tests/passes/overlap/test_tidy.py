"""Views that change nothing are removed from scheduled graphs, and nothing else changes."""

import pytest
import torch
from overlapping import planned, traced_tokens
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

import autotp
from passes.overlap.primitives import in_one_format, laid_out
from passes.overlap.tidy import tidy

VIEWS = (torch.ops.aten.view.default, torch.ops.aten.reshape.default, torch.ops.aten._unsafe_view.default)


def traced(function, *args):
    """Traces a function with fake tensors; returns the module and its graph."""
    module = make_fx(function, tracing_mode="fake")(*args)
    return module, module.graph


def count(graph: fx.Graph, *targets: object) -> int:
    return sum(node.target in targets for node in graph.nodes)


def test_views_of_views_and_transposes_of_transposes():
    def function(x):
        return x.view(6, 4).view(6, 4).view(2, 3, 4).view(24) + x.t().t().reshape(24)

    x = torch.randn(4, 6)
    module, graph = traced(function, x)
    before = count(graph, *VIEWS, torch.ops.aten.t.default)
    tidy(graph)
    graph.lint()
    module.recompile()
    assert before == 7 and count(graph, *VIEWS, torch.ops.aten.t.default) == 2
    assert torch.equal(module(x), function(x))


def test_what_is_not_in_order_is_viewed_as_it_was():
    def function(x):
        return x.t().reshape(24).view(2, 12) * 1, x.t().view(6, 2, 2).reshape(6, 4) * 1

    x = torch.randn(4, 6)
    module, graph = traced(function, x)
    tidy(graph)
    graph.lint()
    module.recompile()
    for mine, theirs in zip(module(x), function(x), strict=True):
        assert torch.equal(mine, theirs) and mine.stride() == theirs.stride()


def test_outputs_stay_tensors_of_their_own():
    module, graph = traced(lambda x: (x.view(4, 6), x.t().t(), x.view(24).view(4, 6)), torch.randn(4, 6))
    tidy(graph)
    (outputs,) = graph.output_node().args
    assert len(set(outputs)) == 3 and not any(node.op == "placeholder" for node in outputs)


def test_what_lies_in_order_is_not_arranged_again():
    """Except tensors with a dim of size 1: the kernel may give them other strides than those traced."""

    def function(x, one):
        return in_one_format(x) + 1, in_one_format(x.t()) + 1, in_one_format(one) + 1, laid_out(x, torch.contiguous_format)

    _, graph = traced(function, torch.randn(4, 6), torch.randn(4, 1))
    tidy(graph)
    graph.lint()
    arranged = [node.meta["val"].shape for node in graph.nodes if node.target in (in_one_format, laid_out)]
    assert arranged == [(6, 4), (4, 1)]
    x, _ = graph.find_nodes(op="placeholder")
    assert graph.output_node().args[0][3] is x


@pytest.mark.parametrize("strategy", ["data", "tensor3d"])
def test_scheduled_graphs_have_none_left(strategy, monkeypatch):
    assert left(traced_tokens(strategy, {})) == 0
    monkeypatch.setattr("passes.overlap.pipeline.PASSES", ())
    assert left(traced_tokens(strategy, {})) > 0, "there are some before"


def left(found):
    """The number of views in traced graphs that return the shape and strides they are given, except outputs."""
    count = 0
    for graph in (found.cut.forward, found.cut.backward):
        given = {node for node in graph.output_node().all_input_nodes}
        for node in graph.nodes:
            if node.target in VIEWS and node not in given:
                old, new = node.args[0].meta["val"], node.meta["val"]
                count += (old.shape, old.stride()) == (new.shape, new.stride())
    return count


class Odd(nn.Module):
    """Returns one tensor in several shapes, one of which is its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8).double()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = self.inner(x)
        return y, y.view(y.shape), y.reshape(-1, 4), (y.t().t() * 2).sum()


def test_a_model_that_gives_views_of_one_tensor():
    model, args = Odd(), (torch.randn(4, 8, dtype=torch.float64),)
    parallel = autotp.simulate(model, planned(model, args, "data"), args, schedule="overlap")
    for mine, theirs in zip(parallel(*args), model(*args), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=0)
    sum(value.square().sum() for value in parallel(*args)).backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    sum(value.square().sum() for value in model(*args)).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-12, atol=0)
