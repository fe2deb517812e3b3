"""Settings in which each known scheme is the fastest family, compared with the plans of `auto`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from autotp import FAMILIES, Plan
from benchmarks.families import plans
from benchmarks.models import chain, gpt, products
from benchmarks.tables import command, machine, table
from costmodel import Topology
from passes.capture import capture

__all__ = ["SETTINGS", "Setting", "make", "outcome"]


@dataclass(frozen=True, slots=True)
class Setting:
    """A model on a machine that suits one family.

    Attributes:
        family: The family that is expected to win here.
        why: The reason, for the table.
        model: The name of the model in the table.
        build: Creates the model and its example inputs.
        machine: The name of a topology, or "flat": links of 20 GB/s and 5 us between any two A100s.
        devices: The number of devices.
        memory: The memory limit of each device in bytes; None for all of its memory.
        mode: ``train`` or ``inference``.
    """

    family: str
    why: str
    model: str
    build: Callable[[], tuple[Any, Any]]
    machine: str
    devices: int
    memory: float | None = None
    mode: str = "train"

    def topology(self) -> Topology:
        if self.machine != "flat":
            return Topology.load(self.machine).resized(self.devices)
        device = Topology.load("dgx-a100").device
        return Topology.flat(self.devices, bandwidth=20e9, latency=5e-6, device=device)


SETTINGS = (
    Setting("data", "a small model and a large batch", "GPT, 4 × 1024, batch 64 × 1024",
            lambda: gpt(4, 1024, 16, 32000, 64, 1024), "dgx-h100", 8),
    Setting("zero3", "the same, but whole parameters do not fit", "GPT, 4 × 4096, batch 64 × 2048",
            lambda: gpt(4, 4096, 32, 32000, 64, 2048), "flat", 8, 13e9),
    Setting("megatron-1d", "one token at a time on fast links: few, small messages", "GPT, 4 × 4096, one token",
            lambda: gpt(4, 4096, 32, 32000, 1, 1), "dgx-h100", 8, None, "inference"),
    Setting("megatron-sp", "one sequence on fast links: norms and residuals cost memory traffic",
            "GPT, 4 × 4096, batch 1 × 2048", lambda: gpt(4, 4096, 32, 32000, 1, 2048), "dgx-a100", 8),
    Setting("tensor3d", "wide layers and few tokens on many devices", "GPT, 4 × 8192, batch 1 × 512",
            lambda: gpt(4, 8192, 64, 32000, 1, 512), "flat", 64),
    Setting("atp", "the same on a machine of several levels: a mesh of two axes fits the links",
            "products, 4 × 8192, batch 1 × 512", lambda: products(4, 8192, 64, 1, 512), "dgx-a100", 64),
    Setting("summa-2d", "many tokens in few sequences, and a square of devices that is no cube",
            "products, 4 × 1280, batch 6 × 1024", lambda: products(4, 1280, 20, 6, 1024), "flat", 25),
    Setting("tesseract-2.5d", "long sequences on many devices", "GPT, 4 × 2048, batch 4 × 8192",
            lambda: gpt(4, 2048, 64, 32000, 4, 8192), "flat", 64),
    Setting("3d", "rows, columns and reduction of like size, and a cube of devices",
            "linears, 4096 × 16384, batch 1 × 65536", lambda: chain(4, 4096, 16384, 1, 65536), "flat", 64),
)  # fmt: skip


def outcome(setting: Setting) -> dict[str, Plan | str]:
    """Family -> its plan in this setting, or a text that says why there is none.

    Raises:
        SystemExit: `auto` is slower than a family, or the expected winner is slower than another family.
    """
    model, inputs = setting.build()
    found = plans(capture(model, inputs), setting.topology(), setting.memory, setting.mode)
    seconds = {name: plan.predicted.step_seconds for name, plan in found.items() if isinstance(plan, Plan)}
    least = min(seconds.values())
    if seconds["auto"] > least:
        raise SystemExit(f"{setting.family}: auto is beaten by {min(seconds, key=seconds.__getitem__)}: {seconds}")
    del seconds["auto"]
    if seconds.get(setting.family, float("inf")) > min(seconds.values()) * (1 + 1e-9):
        raise SystemExit(f"{setting.family}: beaten by {min(seconds, key=seconds.__getitem__)}: {seconds}")
    return found


def make() -> str:
    """Plans every setting with every family and compares the predicted step times."""
    winners, margins = [], []
    for setting in SETTINGS:
        found = outcome(setting)
        auto, winner = found["auto"], found[setting.family]
        assert isinstance(auto, Plan) and isinstance(winner, Plan)
        best = winner.predicted.step_seconds
        memory = "" if setting.memory is None else f", {setting.memory / 1e9:.0f} GB"
        winners.append([
            setting.family, setting.model, f"{setting.devices} × {setting.machine}{memory}", setting.why,
            "×".join(map(str, winner.mesh_shape)), f"{best * 1e3:.2f}",
            f"{auto.predicted.step_seconds * 1e3:.2f}", "×".join(map(str, auto.mesh_shape)),
        ])  # fmt: skip
        margins.append(
            [f"**{setting.family}**"]
            + [
                plan if isinstance(plan, str) else f"{100 * (plan.predicted.step_seconds / best - 1):+.1f}%"
                for plan in found.values()
            ]
        )
    header = ["winner", "model", "devices", "why", "its mesh", "its step, ms", "`auto`, ms", "mesh of `auto`"]
    return f"""# Where each known scheme wins

Generated by `python -m benchmarks.rediscovery --write` ({machine()}); the command fails if `auto` is predicted to be slower
than a family, or a family to be slower than another one in its own setting.

Each known scheme has a setting in which it is predicted to be faster than the other schemes. `auto` searches a space that
contains them all, so it is never slower, and mixing schemes is often faster. *flat* is a machine of A100s with links of
20 GB/s and 5 µs between any two; the others are presets of autotp. Steps are predicted, not measured: one training step
(one forward pass for the single token). *GPT, 4 × 1024* has 4 layers of hidden size 1024; *products* has only the
matrix products of such layers, and *linears* has four pairs of linear layers.

{table(header, winners)}
The predicted step of every family relative to that of the winner. *batch too small*: there are fewer sequences than
devices. *no such mesh*: the number of devices does not factorize into as many axes as the scheme needs. `atp` and
`tensor3d` allow the same layouts except around norms.

{table(["setting", *FAMILIES], margins)}"""


if __name__ == "__main__":
    command("rediscovery", "rediscovery.md", make)
