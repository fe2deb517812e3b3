"""Precision policies: what they make of a captured graph, and what contradicts them."""

from __future__ import annotations

import pytest
import torch
from models import gpt2, resnet
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from costmodel.errors import AutotpError
from passes.capture import CaptureError, capture, policy_of, precision_name
from passes.graph import Cast, note_of

BFLOAT = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def _mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 8))


def test_parameters_are_seen_as_they_are_used_and_note_how_they_rest() -> None:
    model = _mlp()
    captured = capture(model, (torch.randn(4, 8),), precision="bf16-mixed")
    held = [node for node in captured.graph_module.graph.nodes if node.name in captured.parameters]
    assert len(held) == 6
    assert all(node.meta["val"].dtype == torch.bfloat16 for node in held)
    assert {note_of(node).cast for node in held} == {Cast(torch.float32, torch.bfloat16, torch.float32)}
    assert captured.precision == "bf16-mixed"
    # The model is unchanged: no cast parameters, and no hooks.
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())
    assert not model._forward_pre_hooks
    assert not model._forward_hooks


def test_without_a_precision_nothing_is_noted() -> None:
    captured = capture(_mlp(), (torch.randn(4, 8),))
    assert captured.precision is None
    assert not any(note_of(node).cast for node in captured.graph_module.graph.nodes)


def test_a_parameter_that_two_modules_share_is_cast_once() -> None:
    model, args, kwargs = gpt2()
    captured = capture(model, args, kwargs, "bf16-mixed")
    assert "lm_head.weight" in captured.aliases
    casts = [note_of(node).cast for node in captured.graph_module.graph.nodes if node.name in captured.parameters]
    assert len(casts) == len(captured.parameters) == len(list(model.parameters()))
    assert all(casts)


def test_batch_norms_keep_their_parameters_beside_their_statistics() -> None:
    model, args, kwargs = resnet()
    captured = capture(model, args, kwargs, BFLOAT)
    norms = {name for name in captured.parameters.values() if "normalization" in name}
    for node in captured.graph_module.graph.nodes:
        if node.name in captured.parameters:
            alone = captured.parameters[node.name] in norms
            assert node.meta["val"].dtype == (torch.float32 if alone else torch.bfloat16)


def test_outputs_are_cast_as_the_policy_says() -> None:
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float64)
    captured = capture(_mlp(), (torch.randn(4, 8),), precision=policy)
    (output,) = captured.graph_module.graph.output_node().args[0]
    assert output.meta["val"].dtype == torch.float64


@pytest.mark.parametrize(
    "policy",
    [
        BFLOAT,
        MixedPrecisionPolicy(torch.float16, torch.float32),
        MixedPrecisionPolicy(torch.bfloat16),
        MixedPrecisionPolicy(reduce_dtype=torch.bfloat16),
        MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float32, cast_forward_inputs=False),
    ],
)
def test_a_policy_as_text_reads_back_as_itself(policy: MixedPrecisionPolicy) -> None:
    assert policy_of(precision_name(policy)) == policy


def test_a_policy_that_changes_nothing_is_none() -> None:
    assert policy_of(MixedPrecisionPolicy()) is None
    assert precision_name(None) is None


@pytest.mark.parametrize("wrong", ["bf16", "param_dtype=blue", "reduce_dtype=int8", 16])
def test_an_unknown_precision_is_refused(wrong: object) -> None:
    with pytest.raises(AutotpError, match="precision"):
        policy_of(wrong)  # type: ignore[arg-type]


def test_parameters_that_are_narrow_already_contradict_a_policy() -> None:
    with pytest.raises(AutotpError, match=r"parameter 0\.weight is bfloat16 already.*model\.float\(\)"):
        capture(_mlp().bfloat16(), (torch.randn(4, 8),), precision="bf16-mixed")
    # Only the sums of their gradients may be wider.
    captured = capture(_mlp().bfloat16(), (torch.randn(4, 8).bfloat16(),), precision="reduce_dtype=float32")
    assert {note_of(n).cast for n in captured.graph_module.graph.nodes if n.name in captured.parameters} == {
        Cast(torch.bfloat16, torch.bfloat16, torch.float32)
    }


def test_inputs_in_another_dtype_than_the_parameters_contradict_a_policy() -> None:
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    with pytest.raises(CaptureError, match=r"contradict each other.*cast_forward_inputs=True"):
        capture(_mlp(), (torch.randn(4, 8),), precision=policy)


class _Norm(nn.Module):
    """A batch norm by hand: nothing marks its parameters as exempt from the cast."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(4)), nn.Parameter(torch.zeros(4))
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("variance", torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.batch_norm(x, self.mean, self.variance, self.weight, self.bias, training=False)


def test_parameters_in_another_dtype_than_statistics_contradict_a_policy() -> None:
    with pytest.raises(CaptureError, match=r"contradict each other.*batch_norm.*bfloat16, bfloat16, bfloat16, float32"):
        capture(_Norm(), (torch.randn(2, 4, 3),), precision="bf16-mixed")


@pytest.mark.parametrize(
    ("model", "args"),
    [
        (nn.Linear(8, 4), (torch.zeros(2, 8, dtype=torch.float64),)),
        (nn.Linear(8, 4), (torch.zeros(2, 8, dtype=torch.int64),)),
        (nn.LayerNorm(8), (torch.zeros(2, 8, dtype=torch.float64),)),
        (nn.LayerNorm(8).bfloat16(), (torch.zeros(2, 8),)),
        (nn.BatchNorm1d(8), (torch.zeros(2, 8, dtype=torch.float64),)),
        (nn.CrossEntropyLoss(), (torch.zeros(2, 8), torch.zeros(2, dtype=torch.int32))),
        (nn.LayerNorm(8), (torch.zeros(2, 8, dtype=torch.bfloat16),)),
        (nn.RMSNorm(8).bfloat16(), (torch.zeros(2, 8),)),
        (nn.CrossEntropyLoss(), (torch.zeros(2, 8), torch.zeros(2, 8))),
    ],
)
def test_dtypes_that_torch_has_no_kernel_for_are_refused(model, args):
    """Fake tensors accept all of them."""
    try:
        model(*args)
    except RuntimeError:
        with pytest.raises(CaptureError, match="reads .*, for which torch has no kernel"):
            capture(model, args)
    else:
        assert capture(model, args)
