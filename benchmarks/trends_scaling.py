"""Predicts where FSDP stops scaling, and from how many devices tensor parallelism overtakes it."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace

from benchmarks.tables import table
from costmodel import Topology, collectives, compute, energy, pipeline, volumes

#: The layers of Llama-2-7B are identical: attention with four square matrices, and an MLP with three.
LAYERS, HIDDEN, INNER = 32, 4096, 11008
PARAMETERS = 4 * HIDDEN**2 + 3 * HIDDEN * INNER
ITEMSIZE = 2

DEVICES = (128, 256, 512, 1024, 2048)
DEGREES = (1, 2, 4, 8)
LOSS = 0.37
"""The relative loss of throughput per device from 128 to 2048 devices: arXiv 2411.13055 [second]."""

HOST_POWER = 575.0
"""A device's share of its node's power in watts, which both powers of the preset dgx-h100 include (see its file)."""


@dataclass(frozen=True, slots=True)
class Assumed:
    """Assumptions where the paper gives no figures.

    Attributes:
        tokens: Tokens per device in a step (weak scaling): one sequence of this length for each device of a replica.
        sequence: Tokens per sequence, which determine the cost of attention.
        efficiency: The share of the peak rate that products reach: the paper's model-FLOP utilization of H100s [second].
        every_hop: Whether the fitted latency applies to every hop of a ring, not only to hops between nodes.
    """

    tokens: int = 4096
    sequence: int = 4096
    efficiency: float = 0.41
    every_hop: bool = False


@dataclass(frozen=True, slots=True)
class Step:
    """One training step.

    Attributes:
        seconds: The time of the whole step.
        compute: The computation time of every device in it, in seconds.
        throughput: Tokens per second of one device.
        power: Watts of one device, including its share of its node.
        energy: Joules per token, including the device's share of its node.
    """

    seconds: float
    compute: float
    throughput: float
    power: float
    energy: float

    @property
    def exposed(self) -> float:
        """The share of the step in which a device waits for communication."""
        return 1 - self.compute / self.seconds

    @property
    def device_power(self) -> float:
        """The power of the device in watts, without its share of the node."""
        return self.power - HOST_POWER


def machine(devices: int, latency: float, assumed: Assumed) -> Topology:
    base = Topology.load("dgx-h100").resized(devices)
    inside, outside = base.levels
    return replace(
        base,
        device=replace(base.device, efficiency=assumed.efficiency),
        levels=(replace(inside, latency=latency) if assumed.every_hop else inside, replace(outside, latency=latency)),
    )


@functools.lru_cache(maxsize=4096)
def step(devices: int, degree: int, latency: float, assumed: Assumed) -> Step:
    """A step on ``devices``, with tensor parallelism of ``degree`` within a replica, and FSDP over the replicas.

    Layer by layer, parameters are gathered in both passes and gradients are reduce-scattered. These collectives are
    prefetched or deferred, so they overlap with the layers' computation (`costmodel.pipeline`). The all-reduces of tensor
    parallelism are exposed.
    """
    topology = machine(devices, latency, assumed)
    mesh = (devices // degree, degree)
    over_data, over_tensor = topology.links(mesh)
    part = ITEMSIZE * PARAMETERS / degree
    gather, scatter = (float(collectives.of_link(kind, part, over_data)) for kind in ("all_gather", "reduce_scatter"))

    rows = assumed.tokens * degree
    reduce = 2 * float(collectives.of_link("all_reduce", ITEMSIZE * rows * HIDDEN, over_tensor))  # attention and MLP
    causal = 2 * assumed.sequence * HIDDEN  # scores and values, half of them masked
    flop = (2 * PARAMETERS + causal) * rows / degree
    work = float(compute.seconds(flop, part, topology.device, "bfloat16"))

    forward = float(pipeline.seconds(gather, work + reduce, LAYERS))
    backward = float(pipeline.seconds(gather + scatter, 2 * work + reduce, LAYERS))
    seconds, computing = forward + backward, 3 * work * LAYERS
    joules = energy.step_energy(topology.device, devices, computing, seconds)
    per_token = energy.per_token(joules, devices * assumed.tokens)
    assert joules is not None and per_token is not None
    return Step(seconds, computing, assumed.tokens / seconds, float(joules / (devices * seconds)), float(per_token))


def all_reduced(degree: int, tokens: float) -> float:
    """Bytes that a device receives for a layer's all-reduces, forward and backward: the closed form of Megatron."""
    form = volumes.LAYER["tensor3d"].subs({volumes.p: 1, volumes.q: degree, volumes.h: HIDDEN, volumes.m: tokens * degree})
    return ITEMSIZE * float(form)


def loss(latency: float, assumed: Assumed) -> float:
    """The relative loss of throughput per device from 128 to 2048 devices without tensor parallelism."""
    return 1 - step(DEVICES[-1], 1, latency, assumed).throughput / step(DEVICES[0], 1, latency, assumed).throughput


@functools.cache
def fitted(assumed: Assumed) -> float:
    """The latency, in seconds per hop, at which `loss` equals the paper's figure."""
    low, high = 0.0, 1e-3
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if loss(middle, assumed) < LOSS else (low, middle)
    return low


def predicted(devices: int, degree: int, assumed: Assumed) -> Step:
    return step(devices, degree, fitted(assumed), assumed)


@functools.cache
def overtakes(degree: int, assumed: Assumed, most: int = 4096) -> int | None:
    """The fewest devices, in whole nodes, on which this tensor-parallel degree has more throughput than degree 1."""
    for devices in range(64, most + 1, 8):
        if predicted(devices, degree, assumed).throughput > predicted(devices, 1, assumed).throughput:
            return devices
    return None


VARIANTS: Mapping[str, Assumed] = {
    "as above": Assumed(),
    "the latency is every hop's": Assumed(every_hop=True),
    "8192 tokens a device": Assumed(tokens=8192),
    "8192 tokens a device, every hop's": Assumed(tokens=8192, every_hop=True),
    "efficiency 0.5": Assumed(efficiency=0.5),
    "efficiency 0.6": Assumed(efficiency=0.6),
}


def _change(now: float, before: float) -> str:
    return f"{100 * (now / before - 1):+.0f} %"


def section() -> str:
    assumed = Assumed()
    rows = []
    for devices in DEVICES:
        for degree in DEGREES:
            found = predicted(devices, degree, assumed)
            rows.append([
                devices, degree, f"{found.throughput:,.0f}", f"{100 * found.exposed:.0f} %", f"{found.power:,.0f}",
                f"{1e3 * found.energy:.0f}",
            ])  # fmt: skip
    variants = []
    for name, variant in VARIANTS.items():
        largest = {degree: predicted(DEVICES[-1], degree, variant).throughput for degree in DEGREES}
        variants.append([
            name, f"{fitted(variant) * 1e6:.1f}", *(overtakes(degree, variant) or "never" for degree in DEGREES[1:]),
            max(largest, key=largest.__getitem__),
        ])  # fmt: skip
    rate = assumed.efficiency
    few, many = (predicted(devices, 1, assumed) for devices in (DEVICES[0], DEVICES[-1]))
    lost = f"{100 * (1 - predicted(1024, 1, assumed).throughput / few.throughput):.0f}"
    latency, preset = fitted(assumed) * 1e6, Topology.load("dgx-h100").levels[1].latency * 1e6
    scales = ", ".join(f"degree {degree} at {overtakes(degree, assumed)}" for degree in DEGREES[1:])
    throughput, power = _change(many.throughput, few.throughput), _change(many.power, few.power)
    device_power, joules = _change(many.device_power, few.device_power), _change(many.energy, few.energy)
    return f"""## Diminishing returns: where tensor parallelism overtakes FSDP

arXiv 2411.13055 reports that for Llama-2-7B with FSDP, from 128 to 2048 H100s, throughput per device falls by 37 % and
power by 6 % [second], so energy per token rises by about half; and that beyond some scale, a tensor-parallel degree of 2 to
4 becomes the better plan [paper abstract]. One number is fitted to the 37 %: {latency:.1f} µs per hop between nodes, for
the rings that gather parameters and scatter gradients (the preset dgx-h100 has {preset:.0f} µs). Everything else is from
the preset or predicted.

Assumptions: {assumed.tokens} tokens per device at any scale (a replica of t devices processes t sequences);
products at {rate} of the peak rate, which is the reported utilization of H100s [second]; bfloat16 everywhere; no
recomputation. The model consists of the {LAYERS} layers, without embedding and head. Gathers and reduce-scatters overlap
with the layers' computation as in `costmodel/pipeline.py`, the all-reduces of tensor parallelism are exposed, and the two
do not slow each other down.

The smallest numbers of devices on which tensor parallelism overtakes pure FSDP: {scales}.
With FSDP alone, from 128 to 2048 devices, throughput per device changes by {throughput} (fitted), power by {power}
including each device's share of its node and by {device_power} without it, and energy per token by {joules}. The power is
not an independent prediction, since the preset's waiting power was itself fitted to the paper's 6 %.

{table(["devices", "tensor degree", "tokens/s per device", "exposed", "W per device", "mJ per token"], rows)}
The shape of the loss is uncertain, since no intermediate figure is known. In this model, communication is completely hidden
until it takes longer than the computation, so only {lost} % is lost up to 1024 devices, and the rest beyond. Collectives
that slow down computation, or stragglers, would bend the curve earlier, and tensor parallelism would pay off on fewer
devices. The scales below are those of this idealized overlap, and depend little on the other assumptions. The best degree
at 2048 devices does depend on them: rings cross all nodes at any degree, which saves only hops inside nodes, so with a
large latency between nodes (8192 tokens), degree 2 is still limited by its rings, and degree 4 is best.

{table(["assumed", "latency fitted, µs", "degree 2 overtakes at", "4 at", "8 at", "best at 2048"], variants)}"""
