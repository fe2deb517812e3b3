"""Source text of transformed functions, to be called in ``forward``: ``torch.vmap``, ``torch.func``, ``autograd.grad``."""

from __future__ import annotations

import random

__all__ = ["derivative"]

_OF_ONE = (
    "{}.tanh()", "{}.sin()", "{}.sigmoid()", "{}.softmax(-1)", "{}.square()", "{}.cumsum(-1)", "{}.flip(-1)",
    "torch.nn.functional.layer_norm({}, a.shape[-1:])", "torch.nn.functional.gelu({})", "({} - a.mean(-1, keepdim=True))",
    "({} * a.detach())", "({} @ torch.ones(a.shape[-1], 2, dtype=a.dtype)).sum(-1, keepdim=True)", "{}.clamp(-0.5, 0.5)",
    "torch.where(a > 0, {}, 0.1 * a)", "torch.cat([{}, a], -1)", "{}.mul(2).mul_(0.75)",
    "{}.log_softmax(-1)", "{}.logsumexp(-1, keepdim=True)", "torch.nn.functional.rms_norm({}, a.shape[-1:])",
    "torch.nn.functional.softplus({})", "torch.nn.functional.normalize({}, dim=-1)", "({} - a.var(-1, keepdim=True))",
    "torch.nn.functional.conv1d({}.reshape(1, 1, -1), torch.ones(1, 1, 1, dtype=a.dtype)).flatten()",
    "torch.nn.functional.max_pool1d({}.reshape(1, 1, -1), 1).flatten()", "torch.einsum('...i,...j->...j', {}, a)",
)  # fmt: skip
_OF_TWO = ("({} * b)", "({} + b.sin())", "torch.stack([{}, b]).sum(0)", "({} / (1 + b.square()))", "torch.lerp({}, b, 0.3)")


def derivative(rng: random.Random, rank: int) -> tuple[str, bool]:
    """A random function of two tensors of the same shape with ``rank`` dims, and whether it returns a pair.

    The function is a parenthesized expression, which can be called. With more than one dim, it is usually mapped over the
    first or last one.
    """
    body = "a"
    for _ in range(rng.choice([1, 2, 3])):
        body = rng.choice([*_OF_ONE, *_OF_TWO * 2]).format(body)
    function, loss = f"lambda a, b: {body}", f"lambda a, b: {body}.square().sum()"
    place = rng.choice([0, 0, 1])
    number = f"argnums={place}"
    kinds = {
        "map": function,
        "grad": f"torch.func.grad({loss}, {number})",
        "both": f"torch.func.grad_and_value({loss}, {number})",
        "twice": f"torch.func.grad(lambda a, b: torch.func.grad({loss}, {number})(a, b).sin().sum(), {number})",
        "jacrev": f"torch.func.jacrev({function}, {number})",
        "jacfwd": f"torch.func.jacfwd({function}, {number})",
        "hessian": f"torch.func.hessian({loss}, {number})",
        "jvp": f"lambda a, b: torch.func.jvp({function}, (a, b), (b, torch.ones_like(b)))[1]",
        "vjp": f"lambda a, b: (lambda out, back: back(out.cos())[{place}])(*torch.func.vjp({function}, a, b))",
        "autograd": _by_autograd(loss, rng.choice(["", ", create_graph=True"])),
    }
    kind = rng.choice(list(kinds))
    text = kinds[kind]
    if kind != "autograd" and rank > 1 and rng.random() < 0.8:
        text = f"torch.vmap({text}, {rng.choice(['in_dims=0', f'in_dims={rank - 1}'])})"
    return f"({text})", kind == "both"


def _by_autograd(loss: str, more: str) -> str:
    inner = f"lambda a, b: torch.autograd.grad(({loss})(a, b), a{more})[0]"
    return f"torch.enable_grad()(lambda a, b: ({inner})(a.detach().requires_grad_(), b))"
