"""Values have the strides that were traced, whatever strides kernels return."""

import dataclasses

import pytest
import torch
from overlapping import planned, same
from thinned import thinned
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import autotp
from autotp.runtime.strides import Arranged, laid_like


class Permuted(nn.Module):
    """Layer norm over the channels of a group norm: its gradient's fake kernel gives other strides than the real one."""

    def __init__(self):
        super().__init__()
        self.group, self.layer = nn.GroupNorm(2, 8), nn.LayerNorm(8)
        self.head = nn.Linear(8, 8)

    def forward(self, x):
        x = self.layer(self.group(x).transpose(1, 2)).transpose(1, 2)
        return self.head(self.group(x).transpose(1, 2)).square().sum()


@pytest.mark.parametrize(
    ("strategy", "mesh"), thinned([("data", (2,)), ("zero3", (2,)), ("megatron-1d", (2,)), ("tensor3d", (2, 2))])
)
@pytest.mark.parametrize("chunks", [{}, {"batch": 2}])
def test_gradients_where_a_kernel_lays_out_its_result_otherwise_than_its_fake_one(strategy, mesh, chunks):
    torch.manual_seed(0)
    model = Permuted().double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.rand_like(parameter))
    args = (torch.randn(8, 8, 6, dtype=torch.float64),)
    plan = dataclasses.replace(planned(model, args, strategy, mesh), chunks=chunks)
    same(model, autotp.simulate(model, plan, args, schedule="overlap"), args)


def test_a_missing_copy_is_put_into_the_graph_once():
    def gradient(given, x):
        x = x.detach().requires_grad_()
        normed = torch.nn.functional.layer_norm(x.transpose(1, 2), (8,))
        (found,) = torch.autograd.grad(normed, x, given)
        return [found.contiguous()]

    inputs = [torch.randn(2, 8, 6, dtype=torch.float64).transpose(1, 2), torch.randn(2, 8, 6, dtype=torch.float64)]
    module = make_fx(gradient, tracing_mode="fake")(*inputs)
    want = gradient(*inputs)[0]
    assert module(*inputs)[0].stride() != want.stride(), "the kernel gives what was traced: this test tests nothing"
    module.graph.set_codegen(torch.fx.graph._BoxedCodeGen())
    module.recompile()
    run = Arranged(module)
    for _ in range(3):
        given = list(inputs)
        (got,) = run(given)
        assert not given, "inputs are let go"
        assert got.stride() == want.stride()
        torch.testing.assert_close(got, want, rtol=0, atol=0)
        assert sum(node.target is laid_like for node in run.module.graph.nodes) == 1


def test_where_kernels_give_what_was_traced_the_graph_stays():
    inputs = [torch.randn(4, 6), torch.randn(6, 4)]
    module = make_fx(lambda a, b: [a @ b, a.t() + b], tracing_mode="fake")(*inputs)
    module.graph.set_codegen(torch.fx.graph._BoxedCodeGen())
    module.recompile()
    run, nodes = Arranged(module), list(module.graph.nodes)
    run(list(inputs))
    assert list(run.module.graph.nodes) == nodes
