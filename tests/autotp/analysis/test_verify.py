"""``autotp verify``: a correct graph passes, and a planted defect is located."""

import pytest
import torch
from models import MODELS
from thinned import thinned
from torch import nn

import autotp
from autotp.analysis.verify import verify, verify_graph
from autotp.runtime.rewrite import rewrite
from passes.graph import note_of
from passes.layouts.reshard import Step

SLOW = autotp.Topology.flat(4, bandwidth=1e12, latency=0.0)


class Perceptron(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.head = nn.Linear(12, 24), nn.Linear(24, 12), nn.Linear(12, 10)

    def forward(self, x):
        return self.head(x + self.down(torch.tanh(self.up(x)))).tanh()


def rewritten(strategy, mesh):
    torch.manual_seed(0)
    model, x = Perceptron().double(), torch.randn(8, 12, dtype=torch.float64)
    plan = autotp.plan(model, SLOW, (x,), strategy=strategy, mesh=mesh, panels=1, chunks={})
    return model, x, rewrite(model, plan, (x,))


def reshards(made, tensor):
    return [n for n in made.graph_module.graph.nodes if note_of(n).tensor == tensor]


def linear(made, number):
    return [n for n in made.captured.graph_module.graph.nodes if "linear" in str(n.target)][number].name


@pytest.mark.parametrize(
    ("name", "strategy", "mesh"),
    thinned(
        [
            ("gpt2", "megatron-1d", (4,)),
            ("gpt2", "3d", (2, 2)),
            ("unet", "auto", (2, 2)),
            ("unet", "tensor3d", (2, 2)),
            ("llama", "zero3", (4,)),
        ],
        first=1,
    ),
)
def test_right_graphs_pass(name, strategy, mesh):
    model, args, kwargs = MODELS[name]()
    plan = autotp.plan(model, SLOW, args, kwargs, strategy=strategy, mesh=mesh, memory=float("inf"))
    found = verify(model, plan, args, kwargs)
    assert found.right, found.departure
    assert found.compared > 40 and found.outputs and found.gradients
    assert max([*found.outputs.values(), *found.gradients.values()]) <= found.tolerance


@pytest.mark.slow
@pytest.mark.parametrize("chunks", [{"batch": 2}, {"rows": 2}, {"batch": 2, "rows": 2}])
@pytest.mark.parametrize(
    ("name", "strategy", "mesh"), thinned([("unet", "megatron-1d", (2, 2)), ("gpt2", "tensor3d", (2, 2))])
)
def test_right_graphs_in_chunks_pass(name, strategy, mesh, chunks):
    model, args, kwargs = MODELS[name]()
    plan = autotp.plan(model, SLOW, args, kwargs, strategy=strategy, mesh=mesh, panels=1, chunks=chunks)
    found = verify(model, plan, args, kwargs)
    assert found.right, found.departure
    assert found.compared > 40 and found.outputs and found.gradients


@pytest.mark.slow
@pytest.mark.parametrize("chunks", thinned([{"batch": 2}, {"rows": 2}], whole=True))
def test_a_defect_in_one_chunk_is_found(chunks):
    model, args, kwargs = MODELS["gpt2"]()
    model = model.double()
    plan = autotp.plan(model, SLOW, args, kwargs, strategy="megatron-1d", mesh=(4,), panels=1, chunks=chunks)
    made = rewrite(model, plan, args, kwargs)
    graph = made.graph_module.graph
    second = next(n for n in graph.nodes if "addmm" in str(n.target) and any(note_of(n).chunk))
    with graph.inserting_after(second):
        wrong = graph.call_function(torch.ops.aten.mul.Tensor, (second, 1.001))
    second.replace_all_uses_with(wrong, delete_user_cb=lambda user: user is not wrong)
    wrong.meta, second.meta = dict(second.meta), {}
    found = verify_graph(model, made, args, kwargs)
    assert found.departure is not None and found.departure.operator == note_of(wrong).operator, found.departure


class Keyed(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(16, 16) for _ in range(3))

    def forward(self, x):
        return nn.functional.scaled_dot_product_attention(self.q(x), self.k(x), self.v(x)).tanh()


def test_a_gradient_that_cancels_out_is_rounding():
    """Softmax does not depend on the bias of keys: its gradient is 0 up to rounding, which differs between devices."""
    torch.manual_seed(0)
    model, x = Keyed(), torch.randn(8, 12, 16)
    plan = autotp.plan(model, SLOW, (x,), strategy="data", mesh=(4,), chunks={})
    found = verify(model, plan, (x,))
    assert found.right and found.gradients["k.bias"] <= found.tolerance, found.departure
    made = rewrite(model, plan, (x,))
    reader = next(n for n in made.graph_module.graph.nodes if note_of(n).tensor == "p_k_bias")
    assert reader.args[3], "its gradient is summed up"
    bias = next(n for n in made.graph_module.graph.nodes if note_of(n).tensor == "p_v_bias")
    bias.args = (*bias.args[:3], ())
    found = verify_graph(model, made, (x,))
    assert found.departure is not None and found.departure.operator == "v.bias", "others' are still compared"


def test_dropped_reduction():
    model, x, made = rewritten("tensor3d", (2, 2))
    (node,) = reshards(made, linear(made, 0))
    node.replace_all_uses_with(node.args[1])
    made.graph_module.graph.erase_node(node)
    found = verify_graph(model, made, (x,))
    assert found.departure.operator == linear(made, 0) and "missing" in found.departure.where
    assert found.departure.module == "up" and max(found.outputs.values()) > 0.01


def test_wrong_axis():
    model, x, made = rewritten("tensor3d", (2, 2))
    (node,) = reshards(made, linear(made, 0))
    steps = [Step(*s) for s in node.args[2]]
    wrong = tuple(tuple(s._replace(axes=tuple(1 - a for a in s.axes))) for s in steps)
    node.args = (*node.args[:2], wrong, node.args[3])
    found = verify_graph(model, made, (x,))
    assert found.departure.operator == linear(made, 0)


def test_wrong_gradient_mirror():
    model, x, made = rewritten("tensor3d", (2, 2))
    # The result of tanh is read by a product with sharded columns, so its gradient has to be reduced.
    (node,) = reshards(made, "tanh")
    assert not node.args[2] and node.args[3]
    node.args = (*node.args[:3], ())
    found = verify_graph(model, made, (x,))
    assert max(found.outputs.values()) <= found.tolerance, "the forward pass is correct"
    assert found.departure.operator == note_of(node).tensor and "gradient" in found.departure.where
    assert max(found.gradients.values()) > 0.01


def test_stale_pad():
    """A shape written for the whole tensor, or for parts of another size than a device's."""
    model, x, made = rewritten("data", (4,))
    add = next(n for n in made.graph_module.graph.nodes if "add" in str(n.target))
    with made.graph_module.graph.inserting_after(add):
        padded = made.graph_module.graph.call_function(torch.nn.functional.pad, (add, (0, 0, 0, 1)))
    padded.meta = dict(add.meta)
    add.replace_all_uses_with(padded, lambda user: user is not padded)
    found = verify_graph(model, made, (x,))
    assert found.departure.operator == note_of(add).operator


def test_swapped_shard():
    model, x, made = rewritten("3d", (2, 2))
    slices = [n for n in made.graph_module.graph.nodes if note_of(n).moves and any(s[0] == "slice" for s in n.args[2])]
    node = slices[0]
    steps = [Step(*s) for s in node.args[2]]
    others = {0: 1, 1: 0}
    wrong = tuple(tuple(s._replace(axes=tuple(others[a] for a in s.axes)) if s.kind == "slice" else s) for s in steps)
    node.args = (*node.args[:2], wrong, node.args[3])
    found = verify_graph(model, made, (x,))
    assert found.departure.operator in (note_of(node).tensor, made.captured.parameters.get(note_of(node).tensor))


class Remembers(nn.Module):
    """Keeps a running mean in one row of a buffer, and reads the buffer."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("seen", torch.zeros(2, 8))

    def forward(self, x):
        y = self.linear(x)
        with torch.no_grad():
            self.seen[1].mul_(0.9).add_(y.mean(0))
        return (y @ self.seen.T).square().mean(), y


@pytest.mark.parametrize(
    ("planted", "where"),
    [
        (None, None),
        ("without_gradient", "the gradient of linear.weight in the captured graph"),
        ("put_back", "output 0 in the captured graph"),
    ],
)
def test_a_captured_graph_that_is_not_the_model_is_found(monkeypatch, planted, where):
    from passes.capture import writes

    if planted == "without_gradient":
        monkeypatch.setattr(writes._Functionaliser, planted, lambda self, new, like: new)
    if planted == "put_back":
        monkeypatch.setattr(writes, planted, lambda build, view, source, new, like: source)
    torch.manual_seed(0)
    model, args = Remembers().double(), (torch.randn(8, 8, dtype=torch.float64),)
    plan = autotp.plan(model, autotp.Topology.flat(2), args, strategy="data")
    found = verify(model, plan, args)
    assert found.right == (planted is None)
    assert planted is None or found.departure.where.startswith(where), found.departure
    assert torch.equal(model.seen, torch.zeros(2, 8)), "the model is as it was"


def test_refusals():
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    x = torch.randn(4, 4)
    plan = autotp.plan(model, autotp.Topology.flat(2), (x,))
    with pytest.raises(autotp.AutotpError, match="random numbers"):
        verify(model, plan, (x,))
    with torch.device("meta"):
        ghost = nn.Linear(4, 4)
    plan = autotp.plan(ghost, autotp.Topology.flat(2), (x.to("meta"),))
    with pytest.raises(autotp.AutotpError, match="meta"):
        verify(ghost, plan, (x,))
