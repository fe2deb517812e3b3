"""A plan's numbers are the model's: outputs, gradients, buffers and three AdamW steps, in float64, to 1e-9."""

import dataclasses
import functools

import pytest
import torch
from comparing import close, loss_of, tensors
from devices import slow_machine
from float64 import double, float64_mode
from models import MODELS
from thinned import thinned

import autotp
from autotp.planner import plan_captured
from autotp.plans.options import Options
from autotp.runtime.durations import how_to_run, overlap_of
from autotp.runtime.rewrite import apply
from autotp.runtime.simulate import Simulated
from passes.capture import capture
from passes.world.world import LocalWorld

FAMILIES = ["auto", "data", "zero3", "megatron-1d", "megatron-sp", "tensor3d", "atp"]
MESHES = [(4,), (2, 2), (8,), (2, 4), (2, 2, 2)]

#: The families with a grid of rows and columns, and meshes for them: [q, q, d] with the depth on any axis.
GRIDS = {
    "summa-2d": [(2, 2), (4, 4), (3, 3), (2, 4)],
    "tesseract-2.5d": [(2, 2, 2), (2, 2, 4), (4, 2, 2), (4, 4), (3, 3), (3, 2, 2)],
    "3d": [(2, 2, 2), (2, 3, 2), (2, 2, 4)],
}

#: A part of each family's scheme names, and the least share of the operators with weights whose scheme has it.
USED = {
    "data": ("data", 1.0),
    "zero3": ("ZeRO-3", 0.9),
    "megatron-1d": ("1D", 0.5),
    "megatron-sp": ("1D", 0.5),
    "tensor3d": ("2D Tensor3D", 0.5),
    "atp": ("2D Tensor3D", 0.5),
    "summa-2d": ("2D SUMMA", 0.8),
    "tesseract-2.5d": ("2.5D", 0.8),
    "3d": ("3D", 0.7),
}

#: Every family, model and mesh at least once, and every family on three models or more. The first cases cover all families.
COVERING = [
    ("unet", "auto", (2, 2)),
    ("llama", "data", (8,)),
    ("gpt2", "zero3", (4,)),
    ("vit", "megatron-1d", (4,)),
    ("bert", "megatron-sp", (4,)),
    ("resnet", "tensor3d", (2, 2)),
    ("vit", "atp", (2, 2)),
    *(
        (name, strategy, mesh)
        for name in ("vit", "gpt2", "unet", "llama", "bert")
        for strategy, mesh in (
            ("summa-2d", (2, 2)),
            ("tesseract-2.5d", (2, 2, 2)),
            ("3d", (2, 2, 2)),
        )
    ),
    ("gpt2", "auto", (2, 2)),
    ("gpt2", "megatron-1d", (2, 4)),
    ("gpt2", "tensor3d", (2, 2, 2)),
    ("llama", "auto", (2, 2, 2)),
    ("llama", "atp", (2, 4)),
    ("llama", "megatron-sp", (2, 2)),
    ("bert", "tensor3d", (2, 2)),
    ("bert", "zero3", (2, 4)),
    ("vit", "auto", (8,)),
    ("resnet", "data", (2, 2)),
    ("resnet", "tensor3d", (2, 4)),
    ("vit", "atp", (2, 2, 2)),
    ("resnet", "megatron-1d", (2, 2, 2)),
    ("resnet", "auto", (4,)),
    ("unet", "zero3", (8,)),
    ("unet", "tensor3d", (2, 2)),
    ("unet", "data", (2, 2, 2)),
    ("unet", "megatron-sp", (2, 4)),
    ("unet", "atp", (4,)),
    ("bert", "summa-2d", (4, 4)),
    ("llama", "summa-2d", (3, 3)),
    ("gpt2", "tesseract-2.5d", (4, 2, 2)),
    ("vit", "tesseract-2.5d", (2, 2, 4)),
    ("unet", "3d", (2, 3, 2)),
    ("bert", "3d", (2, 3, 2)),
]

#: Products in panels: (model, strategy, mesh, panels).
PANELLED = [
    ("gpt2", "summa-2d", (2, 2), 2),
    ("llama", "summa-2d", (2, 4), 2),
    ("bert", "tesseract-2.5d", (2, 2, 2), 4),
    ("llama", "3d", (2, 2, 2), 2),
    ("gpt2", "zero3", (4,), 2),
    ("llama", "megatron-sp", (2, 2), 2),
    ("vit", "auto", (2, 2), 2),
]

#: Scheduled graphs: every family, model and kind of chunks: (model, strategy, mesh, chunks).
OVERLAPPED = [
    ("resnet", "data", (4,), {"batch": 2}),
    ("gpt2", "auto", (2, 2), {}),
    ("vit", "megatron-1d", (2, 2), {"batch": 2, "rows": 2}),
    ("llama", "tensor3d", (2, 2), {"batch": 2, "rows": 2}),
    ("unet", "megatron-1d", (4,), {"batch": 2, "rows": 2}),
    ("bert", "zero3", (4,), {"batch": 2}),
    ("gpt2", "data", (4,), {"batch": 2}),
    ("gpt2", "summa-2d", (2, 2), {"rows": 2}),
    ("llama", "megatron-1d", (2, 2), {"rows": 2}),
    ("llama", "tesseract-2.5d", (2, 2, 2), {"batch": 2}),
    ("bert", "megatron-sp", (2, 2), {"batch": 4}),
    ("vit", "atp", (2, 2), {"batch": 4}),
    ("vit", "3d", (2, 2, 2), {"rows": 2}),
    ("resnet", "tensor3d", (2, 2), {"batch": 2}),
    ("unet", "tensor3d", (2, 2), {"batch": 2}),
    ("gpt2", "tensor3d", (2, 2, 2), {"batch": 2, "rows": 2}),
    ("bert", "summa-2d", (2, 4), {"batch": 2, "rows": 2}),
    ("llama", "3d", (2, 2, 2), {"batch": 2, "rows": 2}),
]


#: Recomputation, in autograd's order (chunks None) or overlapped: (model, strategy, mesh, chunks, way).
RECOMPUTED = [
    ("llama", "data", (4,), None, "full"),
    ("vit", "megatron-sp", (2, 2), {}, "full"),
    ("gpt2", "megatron-sp", (2, 2), {}, "full"),
    ("unet", "megatron-1d", (4,), {}, "full"),
    ("gpt2", "zero3", (4,), None, "selective"),
    ("llama", "tensor3d", (2, 2), {"batch": 2}, "selective"),
    ("llama", "3d", (2, 2, 2), {}, "full"),
    ("bert", "auto", (2, 2, 2), {"rows": 2}, "full"),
    ("bert", "summa-2d", (2, 2), {}, "selective"),
    ("vit", "atp", (2, 2), {}, "full"),
    ("resnet", "tensor3d", (2, 2), {}, "full"),
    ("resnet", "data", (4,), {"batch": 2}, "selective"),
    ("unet", "tesseract-2.5d", (2, 2, 2), None, "selective"),
]


#: Parameters that are gathered only once: as above, (model, strategy, mesh, chunks, way).
ONCE = [
    ("gpt2", "zero3", (4,), None, "none"),
    ("llama", "zero3", (2, 2), {}, "none"),
    ("bert", "zero3", (4,), {"batch": 2}, "selective"),
    ("vit", "3d", (2, 2, 2), {}, "none"),
    ("unet", "summa-2d", (2, 2), {}, "full"),
    ("resnet", "zero3", (4,), {}, "none"),
]


def written(value):
    return str(value).replace(" ", "")


@functools.cache
def captured(name):
    with float64_mode():
        model, args, kwargs = double(MODELS[name])
        return capture(model, args, kwargs)


def check(name, strategy, mesh, panels=None, chunks=None, overlapped=False, recompute="none", twice=True):
    options = Options(strategy, mesh=mesh, panels=panels, schedule="none", recompute=recompute, reshard_after_forward=twice)
    plan = plan_captured(captured(name), slow_machine(mesh), options)
    plan = dataclasses.replace(plan, chunks=chunks or {})
    # No topology needs stages, buckets and chunks at once: run every all_reduce over several axes level by level.
    how = dataclasses.replace(overlap_of(plan), faster=lambda *_: True) if overlapped else how_to_run(plan, "none")
    with float64_mode():
        plain, args, kwargs = double(MODELS[name])
        model, _, _ = double(MODELS[name])
        ours = Simulated(model, plan, apply(captured(name), plan), LocalWorld(mesh), lambda _: how)
        # With its default epsilon, Adam makes a full step in a random direction of a gradient that is 0 up to rounding.
        optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2, eps=1e-3) for m in (plain, model)]
        for step in range(3):
            expected, output = plain(*args, **kwargs), ours(*args, **kwargs)
            assert type(output) is type(expected)
            for got, want in zip(tensors(output), tensors(expected), strict=True):
                close(got, want, want.abs().max().item(), f"output in step {step}")
            for m, result in ((plain, expected), (model, output)):
                m.zero_grad()
                loss_of(result).backward()
            wanted = {n: p.grad for n, p in plain.named_parameters()}
            largest = max(g.abs().max().item() for g in wanted.values() if g is not None)
            for n, p in model.named_parameters():
                if wanted[n] is None:
                    assert p.grad is None or not p.grad.any(), n
                else:
                    scale = max(wanted[n].abs().max().item(), 1e-3 * largest)
                    close(p.grad, wanted[n], scale, f"gradient of {n} in step {step}")
            for optimizer in optimizers:
                optimizer.step()
    assert how is None or all(found is not None for found in ours._compiled.values())
    for (n, want), got in zip(plain.named_parameters(), model.parameters(), strict=True):
        close(got, want, max(want.abs().max().item(), 1e-2), f"parameter {n} after three steps")
    for (n, want), got in zip(plain.named_buffers(), model.buffers(), strict=True):
        close(got, want, want.double().abs().max().item(), f"buffer {n}")
    return plan


def weight_operators(plan):
    return [op for op in plan.operators if op.target.startswith(("aten.linear", "aten.addmm", "aten.conv"))]


def assert_used(plan, strategy, mesh):
    operators = weight_operators(plan)
    sharded = sum(op.scheme != "replicated" for op in operators)
    assert sharded >= 0.5 * len(operators), [op.scheme for op in operators]
    if 3 in mesh and mesh != (2, 3, 2):
        return  # sizes that 3 does not divide are not sharded
    if strategy in USED and not (len(mesh) == 1 and strategy in ("tensor3d", "atp")):
        scheme, share = USED[strategy]
        if strategy in ("tensor3d", "atp") and len(mesh) == 3:
            scheme = "3D"  # as weights also rest sharded over the batch's axis, layouts at rest are those of 3D
        names = {scheme}
        if strategy in ("megatron-1d", "megatron-sp") and len(mesh) > 1:
            names.add("SUMMA")  # likewise: the optimizer's step is faster on shards
        found = sum(any(name in op.scheme for name in names) for op in operators)
        assert found >= share * len(operators), (scheme, [op.scheme for op in operators])


@pytest.mark.parametrize(
    ("name", "strategy", "mesh"), thinned(COVERING, first=4, slow=len(autotp.FAMILIES) - 4), ids=written
)
def test_a_covering_part(name, strategy, mesh):
    plan = check(name, strategy, mesh)
    assert_used(plan, strategy, mesh)


@pytest.mark.parametrize(("name", "strategy", "mesh", "chunks"), thinned(OVERLAPPED, slow=1), ids=written)
def test_overlap(name, strategy, mesh, chunks):
    """Scheduled forward and backward graphs, with chunks, and with merged and staged collectives."""
    plan = check(name, strategy, mesh, 1, chunks, overlapped=True)
    assert_used(plan, strategy, mesh)


@pytest.mark.exact
def test_overlap_of_panels():
    check("llama", "3d", (2, 2, 2), 2, overlapped=True)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "strategy", "mesh", "panels"), thinned(PANELLED, 4), ids=written)
def test_panels(name, strategy, mesh, panels):
    plan = check(name, strategy, mesh, panels)
    found = [op.panels for op in weight_operators(plan)]
    assert set(found) <= {1, panels} and found.count(panels) >= 2


@pytest.mark.slow
@pytest.mark.parametrize("case", thinned(RECOMPUTED, first=1, whole=True), ids=written)
def test_recomputation(case):
    name, strategy, mesh, chunks, recompute = case
    plan = check(name, strategy, mesh, 1, chunks, overlapped=chunks is not None, recompute=recompute)
    kept = plan_captured(
        captured(name), slow_machine(mesh), Options(strategy, mesh=mesh, panels=1, schedule="none", recompute="none")
    )
    assert len(plan.recomputed) >= 0.3 * len(plan.operators)
    assert plan.predicted.memory_bytes < kept.predicted.memory_bytes
    assert plan.predicted.step_seconds > kept.predicted.step_seconds


@pytest.mark.parametrize("case", thinned(ONCE, slow=1, whole=True), ids=written)
def test_parameters_gathered_once(case):
    name, strategy, mesh, chunks, recompute = case
    plan = check(name, strategy, mesh, 1, chunks, chunks is not None, recompute, twice=False)
    options = Options(strategy, mesh=mesh, panels=1, schedule="none", recompute=recompute, reshard_after_forward=True)
    twice = plan_captured(captured(name), slow_machine(mesh), options)
    assert not twice.gathered_once and len(plan.gathered_once) >= 0.3 * len(plan.layouts)
    assert plan.predicted.memory_bytes > twice.predicted.memory_bytes
    assert plan.predicted.communication_seconds < 0.97 * twice.predicted.communication_seconds


@pytest.mark.exact
@pytest.mark.parametrize("recompute", ["selective", "full"])
@pytest.mark.parametrize("mesh", [(4,), (2, 2), (2, 2, 2)], ids=written)
@pytest.mark.parametrize("strategy", [*FAMILIES, *GRIDS])
@pytest.mark.parametrize("name", list(m for m in MODELS if m != "llama_logits"))
def test_the_whole_matrix_recomputed(name, strategy, mesh, recompute):
    check(name, strategy, mesh, 1, {"batch": 2}, overlapped=True, recompute=recompute)


@pytest.mark.exact
@pytest.mark.parametrize("panels", [None, 2])
@pytest.mark.parametrize(("strategy", "mesh"), [(s, m) for s, meshes in GRIDS.items() for m in meshes], ids=str)
@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "vit", "unet"])
def test_the_grids(name, strategy, mesh, panels):
    check(name, strategy, mesh, panels)


@pytest.mark.exact
@pytest.mark.parametrize("chunks", [{}, {"batch": 2}, {"rows": 2}, {"batch": 2, "rows": 2}], ids=str)
@pytest.mark.parametrize("mesh", MESHES, ids=written)
@pytest.mark.parametrize("strategy", FAMILIES)
@pytest.mark.parametrize("name", list(m for m in MODELS if m != "llama_logits"))
def test_the_whole_matrix_overlapped(name, strategy, mesh, chunks):
    check(name, strategy, mesh, 1, chunks, overlapped=True)


@pytest.mark.exact
@pytest.mark.parametrize("chunks", [{}, {"batch": 2}, {"rows": 2}, {"batch": 2, "rows": 2}], ids=str)
@pytest.mark.parametrize(("strategy", "mesh"), [(s, m) for s, meshes in GRIDS.items() for m in meshes], ids=str)
@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "vit", "unet"])
def test_the_grids_overlapped(name, strategy, mesh, chunks):
    check(name, strategy, mesh, 1, chunks, overlapped=True)


@pytest.mark.exact
@pytest.mark.parametrize("mesh", MESHES, ids=written)
@pytest.mark.parametrize("strategy", FAMILIES)
@pytest.mark.parametrize("name", list(m for m in MODELS if m != "llama_logits"))
def test_the_whole_matrix(name, strategy, mesh):
    check(name, strategy, mesh)


def test_the_covering_part_covers():
    assert {f for _, f, _ in COVERING} == {*FAMILIES, *GRIDS} == set(autotp.FAMILIES)
    assert {f for _, f, _ in COVERING[: len(autotp.FAMILIES)]} == set(autotp.FAMILIES)
    assert {m for _, _, m in COVERING} >= set(MESHES)
    assert {n for n, _, _ in COVERING} == set(MODELS) - {"llama_logits"}
    assert {f for _, f, _, _ in OVERLAPPED} == {*FAMILIES, *GRIDS}
    assert {n for n, _, _, _ in OVERLAPPED} == set(MODELS) - {"llama_logits"}


@pytest.mark.slow
def test_logits_without_labels():
    """With the loss outside the model, logits are whole and propagate gradients."""
    plan = check("llama_logits", "megatron-1d", (2, 2))
    assert any("1D" in op.scheme for op in weight_operators(plan))
