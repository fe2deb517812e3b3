"""Capture: the normalised graph computes what the model computes, including gradients and buffers."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import transformers
from capturing import check, compare, image, program, run, targets
from float64 import double, float64_mode
from models import MODELS
from thinned import thinned
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.distributions import Categorical, Distribution, Normal, kl_divergence

from costmodel.errors import AutotpError
from passes.capture import CaptureError, capture
from passes.capture.signature import advice
from passes.graph import note_of


@pytest.mark.parametrize("name", thinned(MODELS, 3, whole=True))
def test_graph_is_the_model(name: str) -> None:
    model, args, kwargs = double(MODELS[name])
    with float64_mode():
        captured = capture(model, args, kwargs)
        compare(model, args, kwargs, captured)


def test_names_and_state() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.norm = nn.Linear(8, 8), nn.Linear(8, 8), nn.BatchNorm1d(8)
            self.second.weight = self.first.weight
            self.idle = nn.Parameter(torch.ones(3))

        def forward(self, x: torch.Tensor, scale: float = 1.0, *, shift: torch.Tensor, gain: torch.Tensor) -> Any:
            return {
                "y": self.norm(self.second(self.first(x))) * scale * gain + shift,
                "n": scale,
                "nothing": None,
            }

    model = Tied()
    captured = check(model, image(4, 8), shift=image(1), gain=image(8))
    assert sorted(captured.parameters.values()) == sorted(n for n, _ in model.named_parameters())
    assert captured.aliases == {"second.weight": "first.weight"}
    assert captured.unused == ("idle",)
    assert captured.inputs == ("x", "shift", "gain")
    assert captured.outputs == 3
    assert {captured.buffers[b] for b in captured.mutations} == {
        "norm.running_mean", "norm.running_var", "norm.num_batches_tracked",
    }  # fmt: skip
    modules = {note_of(n).module for n in captured.graph_module.graph.nodes if n.op == "call_function"}
    assert modules == {"", "first", "second", "norm"}
    sources = {note_of(n).source for n in captured.graph_module.graph.nodes if n.op == "call_function"}
    assert all(s.startswith("test_capture.py:") for s in sources)


def test_batch_norm_modes() -> None:
    for norm in (
        nn.BatchNorm2d(8, momentum=0.3),
        nn.BatchNorm2d(8, affine=False),
        nn.BatchNorm2d(8, track_running_stats=False),
    ):
        assert any("batch_norm" in t for t in targets(check(norm, image(4, 8, 2, 2))))
        assert not check(norm.eval(), image(4, 8, 2, 2)).mutations


def test_same_tensor_twice_stays_two_inputs() -> None:
    model, args, kwargs = MODELS["llama"]()
    captured = capture(model, args, kwargs)
    assert len(captured.inputs) == 2
    labels = kwargs["labels"].clone().fill_(3)
    got, _ = run(captured, model, (), {"labels": labels, "input_ids": kwargs["input_ids"]})
    torch.testing.assert_close(got.loss, model(input_ids=kwargs["input_ids"], labels=labels).loss)


def test_signature() -> None:
    captured = capture(
        program(lambda self, y, scale, flag=True: y * scale["by"]),
        (image(4, 8).float(), {"by": torch.ones(8)}),
    )
    x, by = torch.zeros(4, 8), torch.ones(8)
    flat = captured.signature.flatten((x, {"by": by}))
    assert flat[0] is x and flat[1] is by
    with pytest.raises(ValueError, match=r"argument rest\[0\]\['by'\]: expected \[8\] of torch.float32.*got \[4\]"):
        captured.signature.flatten((x, {"by": torch.ones(4)}))
    with pytest.raises(ValueError, match="argument x: .* got .*float64"):
        captured.signature.flatten((x.double(), {"by": by}))
    with pytest.raises(ValueError, match="argument rest: its structure differs"):
        captured.signature.flatten((x, {"other": by}))
    with pytest.raises(TypeError, match="argument x: the example call had a tensor"):
        captured.signature.flatten((3, {"by": by}))
    with pytest.raises(TypeError, match="missing a required argument: 'x'"):
        captured.signature.flatten(())


def test_signature_positional_or_keyword() -> None:
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(8))

        def forward(self, x: torch.Tensor, y: torch.Tensor, flag: bool = False, **more: torch.Tensor) -> torch.Tensor:
            return x * self.weight - y + sum(more.values()) if flag else x - y * self.weight

    x, y = torch.ones(8), torch.zeros(8)
    captured = capture(Scale(), (), {"y": y, "x": x})
    assert captured.inputs == ("x", "y")
    for args, kwargs in [((x, y), {}), ((x,), {"y": y}), ((), {"y": y, "x": x}), ((x, y, False), {})]:
        assert [t is u for t, u in zip(captured.signature.flatten(args, kwargs), (x, y), strict=True)] == [
            True,
            True,
        ]
    with pytest.raises(ValueError, match="argument flag: the graph was captured for the value False, this call has True"):
        captured.signature.flatten((x, y, True))
    free = capture(Scale().double(), (image(8), image(8), True), {"b": image(8), "a": image(8) + 1})
    assert free.inputs == ("x", "y", "b", "a")
    compare(Scale().double(), (image(8), image(8), True), {"b": image(8), "a": image(8) * 2}, free)
    with pytest.raises(ValueError, match="argument more: its structure differs"):
        free.signature.flatten((image(8), image(8), True), {"a": image(8), "b": image(8)})


def _autocast_on(self: Any, y: torch.Tensor) -> Any:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return self.linear(y)


def _data_dependent(self: Any, y: torch.Tensor) -> Any:
    return y[y > 0].sum()


def _branches(self: Any, y: torch.Tensor) -> Any:
    return y if y.sum() > 0 else -y


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (_autocast_on, "autocast.* changes the dtypes"),
        (_data_dependent, "depends on data"),
        (_branches, "torch.export failed on Program.*(?s:.*)Try: no Python control flow"),
    ],
    ids=lambda f: getattr(f, "__name__", ""),
)
def test_refusals(function: Any, message: str) -> None:
    assert issubclass(CaptureError, AutotpError)
    with pytest.raises(CaptureError, match=message):
        capture(program(function), (torch.ones(4, 8),))


def test_advice_for_models_of_transformers_is_theirs_alone() -> None:
    config = transformers.GPT2Config(n_layer=1, n_embd=8, n_head=1, vocab_size=16, bos_token_id=0, eos_token_id=0)
    assert "use_cache=False" in advice(nn.Sequential(transformers.GPT2Model(config)))
    assert "use_cache=False" not in advice(nn.Linear(4, 4))


def test_no_example_inputs() -> None:
    with pytest.raises(AutotpError, match="no example inputs"):
        capture(nn.Linear(8, 8))


class Free(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, *more: torch.Tensor) -> torch.Tensor:
        return self.weight * (1 + len(more))


def test_a_model_that_needs_no_inputs() -> None:
    assert not capture(Free()).inputs


def test_a_model_of_fake_tensors_is_captured_outside_its_mode() -> None:
    with FakeTensorMode():
        model, x = nn.Linear(4, 3), torch.randn(2, 4)
        with pytest.raises(AutotpError, match="inside a FakeTensorMode"):
            capture(model, (x,))
    assert capture(model, (x,)).parameters == {"p_weight": "weight", "p_bias": "bias"}


def test_meta_model_and_tying() -> None:
    config = transformers.GPT2Config(vocab_size=96, n_embd=16, n_head=4, n_layer=1, n_positions=16, use_cache=False)
    with torch.device("meta"):
        model = transformers.GPT2LMHeadModel(config)
    captured = capture(model)
    assert captured.aliases == {"lm_head.weight": "transformer.wte.weight"}
    assert captured.inputs == ("input_ids",)
    with pytest.raises(ValueError, match="tie_word_embeddings"):
        capture(transformers.GPT2LMHeadModel(config).to("meta"))
    with pytest.raises(CaptureError, match="returns a transformers.cache_utils.DynamicCache.*use_cache=False"):
        config.use_cache = True
        capture(transformers.GPT2LMHeadModel(config))


def _normal(_: nn.Module, y: torch.Tensor, validate: bool | None = None) -> Any:
    mean, spread = y.chunk(2, -1)
    found, standard = Normal(mean, spread.exp(), validate), Normal(torch.zeros_like(mean), torch.ones_like(mean))
    return found.log_prob(spread).sum(-1), kl_divergence(found, standard)


def _categorical(_: nn.Module, y: torch.Tensor) -> Any:
    found = Categorical(logits=y)
    return found.log_prob(y.argmax(-1)), found.entropy(), found.probs


@pytest.mark.parametrize("made", [_normal, _categorical])
def test_distributions_do_not_check_values(made: Any) -> None:
    Distribution.set_default_validate_args(True)  # torch.compile undoes it
    check(program(made), image(4, 8))
    with pytest.raises(CaptureError, match="data-dependent"):
        capture(program(functools.partial(_normal, validate=True)), (image(4, 8),))
    with pytest.raises(ValueError, match="constraint"):
        Normal(torch.zeros(2), -torch.ones(2))


def _set(_: nn.Module, y: torch.Tensor) -> Any:
    return {y}


def test_what_cannot_be_returned_is_named() -> None:
    with pytest.raises(CaptureError, match="Program: forward returns a set. Return tensors in lists, tuples and dicts"):
        capture(program(_set), (image(4, 8),))
