"""Forward hooks on modules of a distributed model are called as on the plain model, with DTensors of the plan's layouts."""

import copy
import itertools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves, tree_map

import autotp

SIX = {"rtol": 1e-9, "atol": 1e-12}


class Block(nn.Module):
    def __init__(self, shared):
        super().__init__()
        self.qkv, self.out, self.act, self.norm = nn.Linear(16, 48), nn.Linear(16, 16), nn.ReLU(inplace=True), shared

    def forward(self, x, *, scale=1.0):
        q, k, v = (each.unflatten(-1, (4, 4)).transpose(1, 2) for each in self.qkv(self.norm(x)).chunk(3, -1))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return {"x": x + self.act(self.out(mixed)) * scale, "scale": scale}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        shared = nn.LayerNorm(16)
        self.blocks, self.head = nn.ModuleList([Block(shared), Block(shared)]), nn.Linear(16, 8)

    def forward(self, x):
        for block in self.blocks:
            x = block(x, scale=2.0)["x"]
            x.add_(1)
        return self.head(x.flatten(0, 1))


PATTERNS = ["blocks.*", "blocks.*.qkv", "blocks.*.act", "blocks.1.norm", "head"]
NAMES = ["blocks.0", "blocks.1", "blocks.0.qkv", "blocks.1.qkv", "blocks.0.act", "blocks.1.act", "blocks.0.norm", "head"]


def whole(value):
    """What a hook sees, as the plain model's value; copied, so that a later change in place does not show."""
    return (
        value.full_tensor() if isinstance(value, DTensor) else value.clone() if isinstance(value, torch.Tensor) else value
    )


def watched(model):
    """Registers hooks of all kinds on all observed modules; returns what they see, in order, and the types of tensors."""
    seen, kinds = [], set()

    def look(name, kind):
        def hook(module, *given):
            kinds.update(type(leaf) for leaf in tree_leaves(given) if isinstance(leaf, torch.Tensor))
            seen.append((name, kind, tree_map(whole, given)))

        return hook

    for name in NAMES:
        module = model.get_submodule(name)
        module.register_forward_pre_hook(look(name, "before"))
        module.register_forward_pre_hook(look(name, "before, with keywords"), with_kwargs=True, prepend=True)
        module.register_forward_hook(look(name, "after"))
        module.register_forward_hook(look(name, "after, with keywords"), with_kwargs=True)
    return seen, kinds


def check(mine, theirs):
    mine, theirs = tree_leaves(mine), tree_leaves(theirs)
    assert [type(each) for each in mine] == [type(each) for each in theirs]
    for a, b in zip(mine, theirs, strict=True):
        assert torch.testing.assert_close(a, b, **SIX) is None if isinstance(a, torch.Tensor) else a == b


def hooks_see_what_plain_ones_see():
    """For every layout, schedule, mode and shape; the loss and its gradients are those without hooks."""
    ranks = dist.get_world_size()
    torch.manual_seed(0)
    model, x = Net().double(), torch.randn(8, 4, 16, dtype=torch.float64)
    cases = [("megatron-1d", (ranks,), "overlap"), ("zero3", (ranks,), "none")]
    if ranks == 4:
        cases = [*itertools.product(("data", "zero3"), [(4,)], ("overlap", "none"))]
        cases += itertools.product(("tensor3d", "megatron-sp"), [(2, 2)], ("overlap", "none"))
    for strategy, mesh, schedule in cases:
        plain = copy.deepcopy(model)
        recompute = "full" if strategy == "zero3" else "none"
        asked = {"strategy": strategy, "mesh": mesh, "schedule": schedule, "recompute": recompute}
        parallel = autotp.parallelize(model, None, (x,), observe=PATTERNS, **asked)
        (mine, kinds), (theirs, _) = watched(parallel), watched(plain)
        for each in (parallel, plain):
            each(x).square().mean().backward()
            with torch.no_grad():
                each.eval()(x[:5])
        check(mine, theirs)
        assert kinds == {DTensor}
        for (name, parameter), other in zip(parallel.named_parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(parameter.grad.full_tensor(), other.grad, **SIX, msg=f"{asked} {name}")
        again = autotp.parallelize(model, None, (x,), plan=autotp.Plan.from_json(parallel.plan.to_json()))
        again.blocks[1].register_forward_hook(lambda *_: None)
        again(x)


def layouts_are_the_plans():
    """A DTensor's local part is as the plan says, so a loss of local parts gives the whole gradient."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    torch.manual_seed(0)
    model, x = Net().double(), torch.randn(8, 4, 16, dtype=torch.float64)
    plain = copy.deepcopy(model)
    parallel = autotp.parallelize(model, None, (x,), strategy="data", mesh=(ranks,), observe=["blocks.0"])
    kept = {}
    for each in (parallel, plain):
        each.blocks[0].register_forward_hook(lambda module, given, made: kept.update({"x": made["x"] * 1}))
        loss = each(x).square().mean()
        if each is parallel:
            assert kept["x"].to_local().shape == (8 // ranks, 4, 16)
            part = x.tensor_split(ranks)[rank]
            loss = loss + (kept["x"].to_local() * part).sum()
        else:
            loss = loss + ((kept["x"] - 0) * x).sum()
        loss.backward()
    for (name, parameter), other in zip(parallel.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad.full_tensor(), other.grad, **SIX, msg=name)


def mistakes():
    """Hooks that do more than look, and hooks on modules that are not observed."""
    ranks = dist.get_world_size()
    model, x = Net().double(), torch.randn(8, 4, 16, dtype=torch.float64)
    with pytest.raises(autotp.AutotpError, match="'block.*' names no module inside Net; did you mean 'blocks"):
        autotp.parallelize(model, None, (x,), observe=["block.*"])
    with pytest.raises(autotp.AutotpError, match="observe='blocks.*': give a list"):
        autotp.parallelize(model, None, (x,), observe="blocks.*")
    handle = model.head.register_forward_hook(lambda *_: None)
    with pytest.raises(autotp.AutotpError, match=r"'head' has a forward hook.*observe=\['head'\]"):
        autotp.parallelize(model, None, (x,), observe=["head"])
    handle.remove()
    parallel = autotp.parallelize(model, None, (x,), strategy="megatron-1d", mesh=(ranks,), observe=["blocks.0"])
    with pytest.raises(autotp.AutotpError, match=r"observe=\['head'\], but the plan is for observe=\['blocks.0'\]"):
        autotp.parallelize(model, None, (x,), plan=parallel.plan, observe=["head"])
    observed = parallel.blocks[0]
    for register in (parallel.head.register_forward_hook, parallel.head.register_forward_pre_hook):
        with pytest.raises(autotp.AutotpError, match=r"observe=\['head'\]"):
            register(lambda *_: None)
    with pytest.raises(autotp.AutotpError, match="no backward hooks of parts"):
        observed.register_full_backward_hook(lambda *_: None)
    with pytest.raises(autotp.AutotpError, match="always_call"):
        observed.register_forward_hook(lambda *_: None, always_call=True)
    own = (_changed, "changed a tensor in place"), (_changed_part, "changed a tensor in place")
    for wrong, did in ((lambda m, args, made: made, "returned a dict"), *own):
        handle = observed.register_forward_hook(wrong)
        with pytest.raises(autotp.AutotpError, match=f"a forward hook of blocks.0 {did}"):
            parallel(x)
        handle.remove()
    for outputs in ("whole", "dtensor"):
        parallel = autotp.parallelize(model, None, (x,), mesh=(ranks,), observe=["blocks.0"], outputs=outputs)
        for asking in (_asking, lambda m, args, made: made["x"].retain_grad()):
            handle = parallel.blocks[0].register_forward_hook(asking)
            with pytest.raises(autotp.AutotpError, match="a forward hook of blocks.0 asked for the gradient"):
                parallel(x)
            handle.remove()
        kept = []
        parallel.blocks[0].register_forward_hook(lambda m, args, made, kept=kept: kept.append(made["x"]))
        made = parallel(x)
        kept[0].retain_grad()
        with pytest.raises(autotp.AutotpError, match="what module 'blocks.0' is given or returns has a hook or retains"):
            made.square().mean().backward()


def _changed(module, given, made):
    made["x"].mul_(2)


def _changed_part(module, given, made):
    made["x"].to_local().detach().mul_(2)


def _asking(module, given, made):
    made["x"].register_hook(lambda gradient: None)


def main():
    hooks_see_what_plain_ones_see()
    layouts_are_the_plans()
    mistakes()
