"""Models with ``torch.utils.checkpoint``: what it marks is recomputed, unless other options are given."""

import functools

import pytest
import torch
import transformers
from comparing import close
from float64 import double, float64_mode
from thinned import thinned
from torch import nn
from torch.distributed._composable import checkpoint as checkpoint_in_place
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, checkpoint_sequential, create_selective_checkpoint_contexts

import autotp
from passes.capture import capture
from passes.graph import note_of

WIDTH, BATCH = 16, 8


class Block(nn.Module):
    def __init__(self, drop):
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH), nn.Dropout(drop)

    def forward(self, x):
        return self.down(self.drop(F.gelu(self.up(x))).sin())


class Model(nn.Module):
    """Two blocks in a list, called by ``run``, after a linear layer, so that reentrant checkpoints have gradients."""

    def __init__(self, run, drop=0.0, wrap=lambda block: block):
        super().__init__()
        self.first, self.last, self.run = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), run
        self.blocks = nn.ModuleList(wrap(Block(drop)) for _ in range(2))

    def forward(self, x):
        return self.last(self.run(self.blocks, self.first(x))).square().mean()


def _each(blocks, x, **how):
    for block in blocks:
        x = checkpoint(block, x, **how)
    return x


def _as_they_are(blocks, x):
    for block in blocks:
        x = block(x)
    return x


def _nested(blocks, x):
    return checkpoint(lambda x: _each(blocks, x, use_reentrant=False), x, use_reentrant=False)


def _in_place(block):
    checkpoint_in_place(block)
    return block


FORMS = {
    "call": {"run": functools.partial(_each, use_reentrant=False)},
    "reentrant": {"run": functools.partial(_each, use_reentrant=True)},
    "sequential": {"run": lambda blocks, x: checkpoint_sequential(list(blocks), 2, x, use_reentrant=False)},
    "nested": {"run": _nested},
    "wrapper": {"run": _as_they_are, "wrap": checkpoint_wrapper},
    "reentrant wrapper": {
        "run": _as_they_are,
        "wrap": functools.partial(checkpoint_wrapper, checkpoint_impl=CheckpointImpl.REENTRANT),
    },
    "composable": {"run": _as_they_are, "wrap": _in_place},
}
#: Operators inside a block whose results its gradients read.
INSIDE = {"aten.linear.default", "aten.gelu.default", "aten.sin.default"}


def made(form, drop=0.0):
    torch.manual_seed(0)
    return Model(**FORMS[form], drop=drop).double(), (torch.randn(BATCH, WIDTH, dtype=torch.float64),)


def planned(model, args, recompute="auto", kwargs=None, **options):
    chosen = {"strategy": "megatron-1d", "mesh": (2,), "recompute": recompute} | options
    return autotp.plan(model, autotp.Topology.flat(2), args, kwargs, **chosen)


def gradients(model, run):
    model.zero_grad()
    run().backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("schedule", thinned(["overlap", "none"], whole=True))
@pytest.mark.parametrize("form", FORMS)
def test_a_checkpoint_is_recomputed(form, schedule):
    model, args = made(form)
    plan = planned(model, args, schedule=schedule)
    recomputed = [op for op in plan.operators if op.recomputed]
    assert {op.target for op in recomputed} == INSIDE
    assert all(op.module.startswith("blocks") for op in recomputed if op.target == "aten.linear.default")
    wanted = gradients(model, lambda: model(*args))
    got = gradients(model, lambda: autotp.simulate(model, plan, args, schedule=schedule)(*args))
    for name, gradient in wanted.items():
        close(got[name], gradient, gradient.abs().max().item(), name)


@pytest.mark.parametrize("form", thinned(FORMS, 3, whole=True))
def test_something_else_may_be_asked_for(form):
    model, args = made(form)
    none, auto, named = (planned(model, args, way) for way in ("none", "auto", ["last"]))
    assert not none.recomputed
    assert not {op.module for op in named.operators if op.recomputed} - {"last"}
    assert auto.predicted.memory_bytes < none.predicted.memory_bytes


@pytest.mark.parametrize("schedule", thinned(["overlap", "none"], whole=True))
@pytest.mark.parametrize("form", ["call", "reentrant"])
def test_a_checkpoint_repeats_its_masks(form, schedule):
    model, args = made(form, drop=0.5)
    results = []
    for way in ("auto", "none"):
        plan = planned(model, args, way, schedule=schedule)
        assert any("dropout" in op.target for op in plan.operators if op.recomputed) == (way == "auto")
        torch.manual_seed(1)
        results.append(gradients(model, lambda p=plan: autotp.simulate(model, p, args, schedule=schedule)(*args)))
    for name, gradient in results[0].items():
        torch.testing.assert_close(gradient, results[1][name], rtol=1e-12, atol=1e-14)


def test_memory_that_is_short_asks_for_more():
    torch.manual_seed(0)
    model = Model(lambda blocks, x: blocks[1](checkpoint(blocks[0], x, use_reentrant=False)))
    args = (torch.randn(64 * BATCH, WIDTH),)
    ample, full = (planned(model, args, way, strategy="data") for way in ("auto", "full"))
    bound = (ample.predicted.memory_bytes + full.predicted.memory_bytes) / 2
    tight = planned(model, args, memory=bound, strategy="data")
    assert tight.predicted.memory_bytes <= bound
    assert set(tight.recomputed) > set(ample.recomputed) != set()


@pytest.mark.slow
@pytest.mark.parametrize("compile", [False, True])
def test_nothing_is_refused_that_recomputing_by_kinds_makes_fit(compile):
    def block():
        return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Softsign(), nn.Linear(8, 8))

    class Deep(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(block() for _ in range(12))

        def forward(self, x):
            return _nested(self.blocks, x)

    model, args = Deep(), (torch.randn(64, 8),)
    asked = {"topology": autotp.Topology.flat(1), "args": args, "compile": compile}
    selective, ample = (autotp.plan(model, recompute=way, **asked).predicted.memory_bytes for way in ("selective", "auto"))
    assert selective < ample
    assert autotp.plan(model, memory=selective, **asked).predicted.memory_bytes <= selective


def _products_kept(context, function, *args, **kwargs):
    products = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if function in products else CheckpointPolicy.PREFER_RECOMPUTE


def _selective():
    how = functools.partial(create_selective_checkpoint_contexts, _products_kept)
    torch.manual_seed(0)
    model = Model(functools.partial(_each, use_reentrant=False, context_fn=how)).double()
    return model, (torch.randn(BATCH, WIDTH, dtype=torch.float64),)


def test_what_the_policy_of_a_selective_checkpoint_saves_is_kept():
    model, args = _selective()
    assert {op.target for op in planned(model, args).operators if op.recomputed} == INSIDE - {"aten.linear.default"}


def test_a_model_that_was_exported_keeps_its_checkpoints():
    model, args = _selective()
    exported = torch.export.export(model, args, strict=True)  # torch 2.13 exports only checkpoints that have a policy
    unlifted = exported.module()
    assert planned(unlifted, args).recomputed == planned(model, args).recomputed != []


def test_a_reentrant_checkpoint_of_what_has_no_gradient_has_none():
    class First(nn.Module):
        def __init__(self):
            super().__init__()
            self.block, self.last = Block(0.0), nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            return self.last(checkpoint(self.block, x, use_reentrant=True)).square().mean()

    torch.manual_seed(0)
    model, args = First().double(), (torch.randn(BATCH, WIDTH, dtype=torch.float64),)
    ours = autotp.simulate(model, planned(model, args), args)
    ours(*args).backward()
    assert all(p.grad is None or not p.grad.any() for p in model.block.parameters())
    assert model.last.weight.grad.any()


@pytest.mark.exact
@pytest.mark.parametrize("reentrant", [False, True])
def test_transformers_checkpoints_its_layers(reentrant):
    def llama():
        torch.manual_seed(1)
        config = transformers.LlamaConfig(
            vocab_size=96, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=32, use_cache=False, attention_dropout=0.0,
        )  # fmt: skip
        model = transformers.LlamaForCausalLM(config).train()
        model.activation_checkpointing_enable({"use_reentrant": reentrant})
        ids = torch.randint(0, 96, (BATCH, 8))
        return model, (), {"input_ids": ids, "labels": ids}

    with float64_mode():
        model, args, kwargs = double(llama)
        plan = planned(model, args, kwargs=kwargs)
        inside = {op.module for op in plan.operators if op.recomputed}
        assert inside and all(module.startswith("model.layers.") for module in inside)
        got = gradients(model, lambda: autotp.simulate(model, plan, args, kwargs)(**kwargs).loss)
        model.activation_checkpointing_disable()  # autograd would rerun it outside of the mode, in single precision
        wanted = gradients(model, lambda: model(**kwargs).loss)
        for name, gradient in wanted.items():
            close(got[name], gradient, gradient.abs().max().item(), name)


def test_calls_are_numbered_and_nothing_else_is_marked():
    model, args = made("call")
    nodes = capture(model, args).graph_module.graph.nodes
    numbers = {note_of(node).checkpoint.number for node in nodes if "blocks" in note_of(node).module}
    assert numbers == {1, 2}
    assert not any(note_of(node).checkpoint.number for node in nodes if note_of(node).module in ("first", "last"))
