"""Convolutions on channels-last tensors: the same numbers, and no change of memory format between convolutions."""

import dataclasses

import pytest
import torch
from float64 import float64_mode
from models import resnet, unet
from thinned import thinned
from torch import nn

import autotp
from autotp.costs.prices import Prices
from autotp.runtime.durations import overlap_of, task_of
from autotp.runtime.rewrite import rewrite
from autotp.runtime.simulate import Simulated
from passes.overlap import halves
from passes.overlap.channels_last import channels_last, quicker, worthwhile
from passes.overlap.primitives import laid_out
from passes.world.world import LocalWorld

_aten = torch.ops.aten


class Mixed(nn.Module):
    """Convolutions between operators that require contiguous elements: views, attention over pixels, a linear layer."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(4, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1, groups=2)
        self.mix, self.deep = nn.Linear(8, 8), nn.Conv3d(2, 4, 3, padding=1)

    def forward(self, x):
        y = self.second(torch.relu(self.first(x)))
        batch, channels, height, width = y.shape
        rows = self.mix(y.view(batch, channels, height * width).transpose(1, 2))
        y = y + rows.transpose(1, 2).view(batch, channels, height, width)
        planes = self.deep(y.view(batch, 2, 4, height, width))
        return y, planes.view(batch * 4, 4, height, width)


def mixed():
    return Mixed(), (torch.randn(4, 4, 6, 6),), {}


def rewritten(model, args, kwargs, strategy, mesh):
    topology = autotp.Topology.flat(torch.tensor(mesh).prod().item(), bandwidth="1 GB/s", latency="10 us")
    plan = autotp.plan(model, topology, args, kwargs, strategy=strategy, mesh=mesh, panels=1)
    return plan, rewrite(model, plan, args, kwargs)


def total(outputs):
    leaves = [leaf for leaf in torch.utils._pytree.tree_leaves(outputs) if isinstance(leaf, torch.Tensor)]
    return sum((leaf * torch.arange(leaf.numel()).view(leaf.shape)).sum() for leaf in leaves if leaf.is_floating_point())


@pytest.mark.parametrize(
    ("made", "strategy", "mesh"),
    thinned(
        [
            (mixed, "data", (2,)),
            (mixed, "tensor3d", (2, 2)),
            (unet, "auto", (2, 2)),
            (unet, "tensor3d", (2, 2)),
            (resnet, "tensor3d", (2, 2)),  # two devices share three image channels
        ],
        first=1,
    ),
)
def test_the_same_numbers(made, strategy, mesh):
    torch.manual_seed(0)
    with float64_mode():
        model, args, kwargs = made()
    plan, plain = rewritten(model, args, kwargs, strategy, mesh)
    convolutions = []
    graph = channels_last(plain.graph_module, lambda node: convolutions.append(node) or True)
    assert convolutions and graph is not plain.graph_module
    torch.manual_seed(0)
    wanted = model(*args, **kwargs)
    total(wanted).backward()
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    ours = Simulated(model, plan, dataclasses.replace(plain, graph_module=graph), LocalWorld(mesh), overlap_of)
    torch.manual_seed(0)
    found = ours(*args, **kwargs)
    assert all(found_ is not None for found_ in ours._compiled.values()), "it was scheduled"
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12)
    assert all(leaf.is_contiguous() for leaf in torch.utils._pytree.tree_leaves(found) if isinstance(leaf, torch.Tensor))
    total(found).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-9, atol=1e-10, msg=name)


@pytest.mark.skipif(
    torch.torch_version.TorchVersion(torch.__version__) >= (2, 14), reason="its fake group norm forgets the format"
)
def test_nothing_is_laid_out_between_convolutions():
    model = nn.Sequential(
        nn.Conv2d(4, 16, 3), nn.GroupNorm(4, 16), nn.SiLU(), nn.Conv2d(16, 16, 3), nn.ReLU(), nn.Conv2d(16, 4, 3)
    )
    args = (torch.randn(2, 4, 16, 16),)
    plan, made = rewritten(model, args, {}, "data", (2,))
    prices = Prices(plan.topology, plan.mesh_shape)
    module, captured = made.graph_module, made.captured
    inputs = {n.name: torch.empty(n.meta["val"].shape) for n in captured.graph_module.graph.nodes if n.op == "placeholder"}
    inputs[captured.inputs[0]] = torch.empty(1, 4, 16, 16)
    found = halves(module, (2,), (0,), inputs, frozenset(captured.parameters)).refined()
    copies = [n for n in found.cut.forward.nodes if n.target is laid_out and task_of(n, prices).seconds]
    assert [n.args[1] for n in copies] == [torch.channels_last], "the image"
    backwards = [n for n in found.cut.backward.nodes if n.target is _aten.convolution_backward.default]
    assert len(backwards) == 3
    assert all(n.args[1].meta["val"].is_contiguous(memory_format=torch.channels_last) for n in backwards)


@pytest.mark.parametrize(
    ("strategy", "chunks", "wanted"),
    thinned(
        [
            ("zero3", {"batch": 2}, True),
            ("megatron-1d", {"batch": 2}, False),
            ("data", {}, True),
            ("megatron-1d", {}, False),
        ],
        first=1,
        slow=1,
    ),
)
def test_images_that_travel_stay_in_order(strategy, chunks, wanted):
    model, args, kwargs = unet()
    topology = autotp.Topology.flat(2, bandwidth="1 GB/s", latency="10 us")
    plan = autotp.plan(model, topology, args, kwargs, strategy=strategy, mesh=(2,), chunks=chunks)
    assert worthwhile(rewrite(model, plan, args, kwargs).graph_module) == wanted


def test_where_it_is_quicker():
    with float64_mode():
        model, args, kwargs = mixed()
    _, made = rewritten(model, args, kwargs, "data", (2,))
    (node, *_) = [n for n in made.graph_module.graph.nodes if n.target is _aten.conv2d.default]
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert not quicker(cpu, node), "no library has kernels for float64"
    for dtype, devices in ((torch.float32, (cpu,)), (torch.bfloat16, (cpu, gpu))):
        node.meta["val"] = node.meta["val"].to(dtype)
        assert [device for device in (cpu, gpu) if quicker(device, node)] == list(devices)
    assert channels_last(made.graph_module, lambda node: False) is made.graph_module
