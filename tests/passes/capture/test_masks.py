"""Masks that constants determine are recognised for what they mean, and no others are.

transformers' models were exact with explicit masks, so no test showed that attention was computed the slow way.
"""

import pytest
import torch
import torch.nn.functional as F
from capturing import check, image, program
from thinned import thinned
from transformers import GPT2Config, GPT2Model, LlamaConfig, LlamaModel

import autotp
from passes.capture import CaptureError, capture, masks

LENGTH = 6


def tril():
    return torch.arange(LENGTH)[:, None] >= torch.arange(LENGTH)


MASKS = {
    "bool": (lambda x: tril(), "causal"),
    "expanded": (lambda x: tril().expand(x.shape[0], 1, LENGTH, LENGTH), "causal"),
    "infinite": (lambda x: torch.zeros(LENGTH, LENGTH, dtype=x.dtype).masked_fill(~tril(), -torch.inf), "causal"),
    "least": (
        lambda x: torch.zeros(LENGTH, LENGTH, dtype=x.dtype).masked_fill(~tril(), torch.finfo(x.dtype).min),
        "causal",
    ),
    "all": (lambda x: tril() | ~tril(), "nothing"),
    "window": (lambda x: tril() & (torch.arange(LENGTH)[:, None] - torch.arange(LENGTH) < 3), "mask"),
    "biased": (lambda x: (torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)).to(x.dtype), "mask"),
    "of an input": (lambda x: tril() & (x[0, 0, 0, 0] == x[0, 0, 0, 0]), "mask"),
    "of one of many": (lambda x: torch.stack([tril(), ~tril() | tril()])[:, None], "mask"),
    "random": (lambda x: torch.rand(LENGTH, LENGTH) > -1, "mask"),
}


class Attention(torch.nn.Module):
    def __init__(self, mask):
        super().__init__()
        self.mask, self.scale = mask, torch.nn.Parameter(torch.ones(8))

    def forward(self, x):
        x = x * self.scale
        return F.scaled_dot_product_attention(x, x.cos(), x.sin(), attn_mask=self.mask(x))


def attentions(captured):
    return [n for n in captured.graph_module.graph.nodes if "scaled_dot_product" in str(n.target)]


@pytest.mark.parametrize("name", MASKS)
def test_a_mask_is_what_it_says(name):
    mask, said = MASKS[name]
    x = torch.randn(2, 4, LENGTH, 8, dtype=torch.float64)
    model = Attention(mask).double()
    captured = capture(model, (x,))
    (node,) = attentions(captured)
    given = (*node.args, *(None, 0.0, False)[len(node.args) - 3 :])
    assert {"causal": (None, True), "nothing": (None, False)}.get(said, (given[3], False)) == (given[3], given[5])
    assert (given[3] is None) == (said != "mask")
    assert (said == "mask") == any("arange" in n.name or "rand" in n.name for n in captured.graph_module.graph.nodes)


@pytest.mark.parametrize("name", ["expanded", "least", "all", "window"])
def test_numbers_stay_the_models(name):
    x = torch.randn(2, 4, LENGTH, 8, dtype=torch.float64)
    model = Attention(MASKS[name][0]).double()
    plan = autotp.plan(model, autotp.Topology.flat(4), (x,), strategy="auto", mesh=(2, 2))
    simulated = autotp.simulate(model, plan, (x,))
    for each in (model, simulated):
        each(x).pow(2).sum().backward()
    torch.testing.assert_close(simulated(x), model(x), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(dict(simulated.named_parameters())["scale"].grad, model.scale.grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("device", thinned(["cpu", "meta"], first=1, slow=1, whole=True))
@pytest.mark.parametrize(
    ("kind", "config"),
    thinned(
        [
            (GPT2Model, GPT2Config(vocab_size=32, n_embd=16, n_layer=2, n_head=2, bos_token_id=None, eos_token_id=None)),
            (
                LlamaModel,
                LlamaConfig(
                    vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2
                ),
            ),
        ],
        slow=1,
    ),
)
def test_models_of_transformers_are_causal(kind, config, device):
    config.use_cache = False
    with torch.device(device):
        model, tokens = kind(config), torch.zeros(2, LENGTH, dtype=torch.int64)
    found = attentions(capture(model, (tokens,)))
    assert len(found) == 2 and all(node.args[3] is None and node.args[5] is True for node in found)
    padded = attentions(capture(model, (tokens,), {"attention_mask": torch.ones_like(tokens)}))
    assert len(padded) == 2 and all(isinstance(node.args[3], torch.fx.Node) for node in padded)


@pytest.mark.parametrize(("most", "recognised"), [(LENGTH**2, True), (LENGTH**2 - 1, False)])
def test_of_a_batch_one_sequence_is_looked_at(monkeypatch, most, recognised):
    monkeypatch.setattr(masks, "_MOST", most)
    config = LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
    config.use_cache = False
    with torch.device("meta"):
        (node,) = attentions(capture(LlamaModel(config), (torch.zeros(5, LENGTH, dtype=torch.int64),)))
    assert (node.args[3] is None) == recognised


def odd():
    return torch.arange(8) % 2 == 1


def without_gradient(y):
    with torch.no_grad():
        return y[odd()]


def written(y):
    mask = torch.zeros(8, 8)
    mask[2:5] = 1.0
    mask[0].fill_(3)
    return y[mask > 0]


def shifted(y):
    places = torch.nonzero(odd())
    places -= 1
    return y[places.squeeze(1)] + y[torch.nonzero(odd()).squeeze(1)]


def counted(y):
    sizes = torch.tensor([3, 5])
    return y[odd()].new_ones(2, 4).sum() * torch.stack([part.sum() for part in y.split(sizes.tolist())])


@torch.no_grad()
def aside(y):
    return y.sin()


def after(y, z):
    return y[odd()], z


DECIDED = {
    "mask": lambda self, y: y[odd()],
    "after a region": lambda self, y: after(y.exp(), aside(y)),
    "two dims": lambda self, y: y[~torch.eye(8, dtype=torch.bool)].view(8, 7),
    "attribute": lambda self, y: y[:, self.mask].mean(1),
    "masked_select": lambda self, y: y[0].masked_select(torch.ones(8, 8).tril() > 0),
    "argwhere": lambda self, y: y[torch.argwhere(odd()).squeeze(1)],
    "where": lambda self, y: y[torch.where(odd())[0]],
    "unique": lambda self, y: y[torch.unique(torch.tensor([1, 3, 3, 1]))],
    "repeat_interleave": lambda self, y: y.repeat_interleave(torch.arange(8), 0),
    "repeat_interleave of all": lambda self, y: y.repeat_interleave(torch.tensor(2)),
    "none": lambda self, y: y[torch.zeros(8, dtype=torch.bool)].sum() + y,
    "parts": lambda self, y: torch.cat([y[odd()], y[~odd()]]),
    "in place": lambda self, y: y[odd()].mul_(3).add_(1),
    "put": lambda self, y: y.index_put((odd(),), y[odd()] * 2),
    "no gradient": lambda self, y: without_gradient(y) * 2 + y[:4],
    "written": lambda self, y: written(y),
    "places written": lambda self, y: shifted(y),
    "numbers": lambda self, y: counted(y),
}


@pytest.mark.parametrize("name", thinned(DECIDED, first=4, slow=4, whole=True))
def test_constants_decide_sizes(name):
    """A mask that the model computes selects equally many elements in each call; torch.export counts them anew."""
    model, x = program(DECIDED[name]), image(8, 8)
    model.mask = torch.tensor([True, False] * 4)
    check(model, x)
    for strategy in ("data", "megatron-1d"):
        parallel = autotp.simulate(model, autotp.plan(model, autotp.Topology.flat(2), (x,), strategy=strategy), (x,))
        torch.testing.assert_close(parallel(x), model(x), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    "select",
    [
        lambda self, y: y[y[:, 0] > 0],
        lambda self, y: y[odd() & (y[:, 0] > 0)],
        lambda self, y: y[self.state > 3],
        lambda self, y: y[torch.rand(8) > 0.5],
        lambda self, y: y[torch.zeros(8, 8).index_copy_(0, torch.arange(3), y[:3].detach()) > 0],
        lambda self, y: y[(self.linear.weight > 0).nonzero()[:, 0]],
    ],
)
def test_data_does_not(select):
    with pytest.raises(CaptureError, match="depends on data"):
        capture(program(select), (torch.randn(8, 8),))


def test_what_is_too_large_is_not_computed(monkeypatch):
    model, x = program(lambda self, y: y[odd()] + torch.ones(100).sum()), torch.randn(8, 8)
    monkeypatch.setattr(masks, "_KEPT", 8 + 8 + 8 - 1)  # the numbers, their remainders, and whether these are 1
    with pytest.raises(CaptureError, match="depends on data"):
        capture(model, (x,))
    monkeypatch.setattr(masks, "_KEPT", 8 + 8 + 8)
    capture(model, (x,))


def test_of_inputs_alone():
    """Constants precede inputs, also where no other placeholder precedes the inputs."""

    class Alone(torch.nn.Module):
        def forward(self, x):
            return x[odd()]

    captured = check(Alone(), image(8, 4))
    assert [*captured.placeholders] == [*captured.constants, "x"]


def test_equal_constants_are_one():
    captured = check(program(lambda self, y: y[odd()] + y[odd()]), image(8, 8))
    assert [each.tolist() for each in captured.constants.values()] == [[1, 3, 5, 7]]
