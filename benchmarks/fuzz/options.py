"""Random options of a case: family, mesh, schedule, chunks, panels, pins, modes, recomputation."""

from __future__ import annotations

import random
from typing import Any

from autotp.plans.families import FAMILIES
from autotp.plans.plan import AXIS_NAMES
from benchmarks.fuzz.case import Case, Options

__all__ = ["MESHES", "random_options"]

MESHES = ((2,), (2,), (3,), (4,), (2, 2), (2, 2), (2, 3), (2, 4), (4, 2), (2, 2, 2))
_GRIDS = {"summa-2d": ((2, 2), (2, 3), (2, 4), (3, 3)), "tesseract-2.5d": ((2, 2, 2),), "3d": ((2, 2, 2),)}


def random_options(rng: random.Random, case: Case) -> Options:
    """Random options, except for strategies and resting layouts: `decided` draws these, after the model was captured."""
    family = rng.choice(["auto", "auto", "auto", *FAMILIES])
    mesh = rng.choice(MESHES)
    if family in ("data", "zero3") and len(mesh) > 1:
        mesh = rng.choice([(2,), (3,), (4,)])
    mesh = rng.choice(_GRIDS.get(family, (mesh,)))
    schedule = rng.choices(["none", "overlap"], [65, 35])[0]
    chunks: dict[str, int] = rng.choice([{}, {}, {}, {}, {"batch": 2}, {"rows": 2}, {"batch": 2, "rows": 2}])
    panels = rng.choice([None, None, None, 2, 4]) if not chunks else None
    return Options(
        family=family,
        mesh=mesh,
        schedule=schedule,
        chunks=chunks,
        panels=panels,
        constraints=_pins(rng, case, len(mesh)) if rng.random() < 0.1 else (),
        free=rng.random() < 0.8,
        training=rng.random() < 0.8,
        inference=rng.random() < 0.08,
        recompute=rng.choices(["none", "selective"], [75, 25])[0],
        reshard_after_forward=rng.choice([None, None, True, False]) if panels is None else None,
    )


def _pins(rng: random.Random, case: Case, axes: int) -> tuple[str, ...]:
    names = [leaf for leaf in case.leaves if leaf.role == "parameter" and leaf.shape and leaf.same is None]
    found: list[str] = []
    axis = rng.choice(AXIS_NAMES[:axes])
    if names:
        leaf = rng.choice(names)
        found.append(f"{leaf.name}={rng.choice([f'Shard({rng.randrange(len(leaf.shape))})@{axis}', f'Replicate@{axis}'])}")
    calls = [step.call.split(".")[3] for step in case.steps if step.call.startswith("torch.ops.aten.")]
    if calls and rng.random() < 0.5:
        term: Any = rng.choice([f"S(0)@{axis}", f"R@{axis}", f"-@{axis}", f"S(1)@{axis}", f"P@{axis}"])
        found.append(f"{rng.choice(calls)}={term}")
    if rng.random() < 0.2:
        found.append(f"output:0=S(0)@{axis}")
    return tuple(found)
