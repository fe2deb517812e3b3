"""Resharding: for any two layouts, the parts after the steps are those of the whole tensor."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Partial, Replicate

from passes.layouts.codes import INNER, codes, decode, fits, restorable, restoring
from passes.layouts.layout import blocks_of, describe, local_shape, place, splits, take
from passes.layouts.reshard import moves, steps
from passes.world.world import LocalWorld

SHAPES = [(8, 12), (5, 7), (16, 6), (24,), (9, 4, 6)]
MESHES = [(2,), (4,), (2, 2), (2, 3), (2, 2, 2), (3, 2, 2)]


@st.composite
def layouts(draw, shape, mesh):
    """Draws a valid layout: axes are placed one after the other, where they still fit."""
    layout = [Replicate() for _ in mesh]
    for axis in range(len(mesh)):
        options = [Replicate(), Partial()]
        for dim, blocks in itertools.product(range(len(shape)), (1, 2, 3, 4)):
            if fits(shape, (*layout[:axis], place(dim, blocks), *layout[axis + 1 :]), mesh):
                options.append(place(dim, blocks))
        layout[axis] = draw(st.sampled_from(options))
    return tuple(layout)


def parts_of(shape, layout, world):
    """Returns (parts, whole), with random addends along partial axes."""
    partial = [a for a, p in enumerate(layout) if isinstance(p, Partial)]
    addends = {}
    for at in world.hosted:
        addends.setdefault(tuple(at[a] for a in partial), torch.randn(shape, dtype=torch.float64))
    parts = [take(addends[tuple(at[a] for a in partial)], layout, world.mesh_shape, at).clone() for at in world.hosted]
    return parts, sum(addends.values())


@pytest.mark.slow
@settings(max_examples=300, deadline=None, derandomize=True)
@given(data=st.data())
def test_any_layout_to_any_other(data):
    shape, mesh = data.draw(st.sampled_from(SHAPES)), data.draw(st.sampled_from(MESHES))
    source, target = data.draw(layouts(shape, mesh)), data.draw(layouts(shape, mesh))
    torch.manual_seed(0)
    world = LocalWorld(mesh)
    parts, whole = parts_of(shape, source, world)
    results = world.run(steps(shape, source, target, mesh), parts)
    partial = [a for a, p in enumerate(target) if isinstance(p, Partial)]
    totals = {}
    for result, at in zip(results, world.hosted, strict=True):
        assert tuple(result.shape) == local_shape(shape, target, mesh, at)
        key = tuple(c for a, c in enumerate(at) if a not in partial)
        totals[key] = totals.get(key, 0) + result
    for at in world.hosted:
        key = tuple(c for a, c in enumerate(at) if a not in partial)
        torch.testing.assert_close(totals[key], take(whole, target, mesh, at), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("source", "target", "kinds"),
    [
        ((Partial(),), (Replicate(),), ["all_reduce"]),
        ((Partial(),), (place(0),), ["reduce_scatter"]),
        ((place(0),), (Replicate(),), ["all_gather"]),
        ((place(0),), (place(1),), ["all_to_all"]),
        ((Replicate(),), (place(0),), ["slice"]),
        ((Replicate(),), (Partial(),), ["mask"]),
        ((Partial(), Partial()), (Replicate(), Replicate()), ["all_reduce"]),
        ((Replicate(), place(0)), (place(0), place(0)), ["all_gather", "slice", "slice"]),
    ],
    ids=str,
)
def test_which_collective_a_change_needs(source, target, kinds):
    mesh = (4,) if len(source) == 1 else (2, 2)
    assert [step.kind for step in steps((8, 8), source, target, mesh)] == kinds


@pytest.mark.parametrize("layout", [(place(0), place(0)), (place(0), place(1))], ids=str)
def test_the_outer_axis_moves_what_is_smallest(layout):
    """Its links are slow: with both axes sharded, tensors are scattered within nodes first, and gathered between first."""
    partial, whole = (Partial(), Partial()), (Replicate(), Replicate())
    scatter = [(m.step.kind, m.step.axes, m.elements) for m in moves((8, 8), partial, layout, (2, 4))]
    assert scatter == [("reduce_scatter", (1,), 64), ("reduce_scatter", (0,), 16)]
    gather = [(m.step.kind, m.step.axes, m.elements) for m in moves((8, 8), layout, whole, (2, 4))]
    assert gather == [("all_gather", (0,), 16), ("all_gather", (1,), 64)]


def test_blocks_that_do_not_line_up_do_not_exist():
    assert fits((24,), (place(0), place(0, 3)), (3, 2))
    assert not fits((24,), (place(0, 2), place(0, 3)), (3, 2))
    assert not fits((4,), (place(0),), (8,))
    assert fits((5,), (place(0),), (3,))
    assert not fits((5,), (place(0),), (4,))
    assert describe((place(0, 3), Partial()), ("x", "y")) == "S(0/3)@x P@y"


@settings(max_examples=600, deadline=None, derandomize=True)
@given(data=st.data())
def test_a_layout_fits_if_no_device_is_left_empty(data):
    """Also for nested uneven splits, of which only the last chunk used to be checked."""
    mesh = data.draw(st.sampled_from([(2, 4), (4, 2), (2, 3), (3, 2), (2, 2, 2), (3, 3), (2, 3, 2)]))
    shape = (data.draw(st.sampled_from([*range(1, 31), 36, 48])), data.draw(st.integers(0, 2)))
    options = data.draw(st.sampled_from([(1,), (1, 2, 3, 4, 6)]))
    placements = [Replicate(), *(place(0, blocks) for blocks in options)]
    layout = tuple(data.draw(st.sampled_from(placements)) for _ in mesh)
    assert fits(shape, layout, mesh) == rests(shape[0], layout, mesh)


def rests(size, layout, mesh):
    """Whether every device has a part of a dim, and an equal part of every block, checked for each device."""
    every = [local_shape((size,), layout, mesh, at)[0] for at in itertools.product(*map(range, mesh))]
    cuts = splits(layout, 0, mesh)
    if all(blocks_of(layout[cut.axis]) == 1 for cut in cuts):
        return all(every)
    left = size
    for cut in cuts:
        blocks = blocks_of(layout[cut.axis])
        if not cut.local_blocks or size % blocks or left % (cut.local_blocks * mesh[cut.axis]):
            return False
        left //= mesh[cut.axis]
    return set(every) == {left}


@pytest.mark.parametrize(
    ("layout", "together"),
    [
        ((place(0, 3), Replicate()), True),
        ((place(0), place(0)), True),
        ((place(0, 2), place(0)), True),
        ((place(0), place(0, 2)), False),
        ((place(0, 3), place(0)), False),
        ((place(0, 3), place(0, 3)), False),
        ((place(0, 3), place(1, 3)), True),
    ],
    ids=str,
)
def test_what_torch_puts_together_again(layout, together):
    """tests/torchrun_programs/special.py compares with torch."""
    assert restorable(layout, (2, 2)) == together
    assert restoring(codes([layout, (Replicate(), Partial())]), (2, 2)).tolist() == [together, True]


def test_a_cut_inside_all_others_has_as_many_blocks_as_they_make_parts():
    for mesh, blocks in (((2, 2, 2), 4), ((2, 4, 1), 4), ((2, 2, 3), 6)):
        assert decode([INNER, 1, 2], mesh) == (place(0, blocks), place(0), place(0, 2))
