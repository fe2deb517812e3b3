"""How far from the communication lower bound the four linears of a GPT-3-175B layer are, by family and devices."""

from __future__ import annotations

import math

from autotp import FAMILIES, Plan, PlannedOperator
from benchmarks.families import plans
from benchmarks.models import gpt
from benchmarks.tables import command, machine, table
from costmodel import Topology
from passes.capture import capture

HIDDEN, HEADS, VOCABULARY, SEQUENCE = 12288, 96, 51200, 2048
BATCHES = (1536, 64)
DEVICES = (8, 64, 512, 4096)

#: The linears of a layer as GPT-2 calls them.
LINEARS = {"attn.c_attn": "QKV", "attn.c_proj": "projection", "mlp.c_fc": "MLP up", "mlp.c_proj": "MLP down"}


def linears(plan: Plan) -> dict[str, PlannedOperator]:
    """The products of the four linears of the plan's second layer, by name."""
    return {
        name: operator
        for module, name in LINEARS.items()
        for operator in plan.operators
        if operator.module.endswith(f"h.1.{module}") and operator.bound_bytes
    }


def ratio(operators: list[PlannedOperator]) -> str:
    return f"{sum(op.bytes_moved for op in operators) / sum(op.bound_bytes for op in operators):.2f}"


def make() -> str:
    """Plans GPT-3 layers with every family and compares what the four linears move with what they must."""
    device = Topology.load("dgx-a100").device
    whole, single = [], []
    for batch in BATCHES:
        model, inputs = gpt(2, HIDDEN, HEADS, VOCABULARY, batch, SEQUENCE)
        captured = capture(model, inputs)
        for devices in DEVICES:
            topology = Topology.flat(devices, bandwidth=20e9, latency=0.0, device=device)
            found = plans(captured, topology, math.inf)
            where = [f"{batch} × {SEQUENCE}", devices]
            ratios = [p if isinstance(p, str) else ratio(list(linears(p).values())) for p in found.values()]
            whole.append([*where, *ratios])
            auto = found["auto"]
            assert isinstance(auto, Plan)
            parts = linears(auto)
            assert list(parts) == list(LINEARS.values()), parts
            least = sum(op.bound_bytes for op in parts.values())
            cells = [f"{ratio([op])} ({op.scheme})" for op in parts.values()]
            single.append([*where, "×".join(map(str, auto.mesh_shape)), f"{least / 1e9:.3f}", *cells])
    return f"""# Distance to the communication lower bound

Made by `python -m benchmarks.lower_bound --write` ({machine()}).

What the four linears of a GPT-3-175B layer (hidden size {HIDDEN}) move, forward and backward, over the least that some
device must move when nothing rests in copies (`costmodel/bounds.py`). The planner minimises time, compute and memory
traffic of all other operators included, on a flat machine of A100s with links of 20 GB/s, without latency and
without a memory bound. A ratio below 1 comes from copies that cost memory instead: whole weights at rest (data
parallelism moves none in the forward pass), an input that is gathered once for two products. The three
products of a linear, one forward and two backward, need each of its three matrices twice; who keeps what it gathered
moves four of the six: 2/3.

All four together:

{table(["batch", "devices", *FAMILIES], whole)}
Each in the plan of `auto`, with the scheme that it uses there; *bound* is that of the four, on each device:

{table(["batch", "devices", "mesh", "bound, GB", *LINEARS.values()], single)}"""


if __name__ == "__main__":
    command("lower_bound", "lower-bound.md", make)
