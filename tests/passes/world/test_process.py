"""The tensors that processes send."""

import torch

from passes.world.process import _in_memory


def test_zeros_without_memory_get_some():
    """Autograd's gradient of ``sgn`` has no memory, which gloo refuses; gradients in other tests have memory."""
    x = torch.randn(2, 4, requires_grad=True)
    (zeros,) = torch.autograd.grad(torch.sgn(x).sum(), x)
    assert zeros._is_zerotensor()
    sent = _in_memory(zeros)
    assert not sent._is_zerotensor() and torch.equal(sent, torch.zeros(2, 4))


def test_zeros_without_memory_have_no_gaps_either():
    """A plain clone keeps a transposed tensor transposed; only the fuzzer had a gradient of ``sgn.T``."""
    x = torch.randn(2, 4, requires_grad=True)
    (zeros,) = torch.autograd.grad(torch.sgn(x).sum(), x)
    assert not zeros.mT.clone().is_contiguous() and _in_memory(zeros.mT).is_contiguous()


def test_what_lies_without_gaps_is_sent_as_it_is():
    x = torch.randn(2, 4)
    assert _in_memory(x) is x and _in_memory(x.t()).is_contiguous()
