"""Masks that constants decide are taken for what they say, and no others are.

transformers' models were exact with their masks written out, so nothing showed that attention was computed the slow way.
"""

import pytest
import torch
import torch.nn.functional as F
from transformers import GPT2Config, GPT2Model, LlamaConfig, LlamaModel

import autotp
from passes.capture import capture, masks

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


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(
    ("kind", "config"),
    [
        (GPT2Model, GPT2Config(vocab_size=32, n_embd=16, n_layer=2, n_head=2, bos_token_id=None, eos_token_id=None)),
        (
            LlamaModel,
            LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2),
        ),
    ],
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
