"""The cost of a plan on a machine that it was not made for: its decisions are kept, and everything is priced anew."""

from __future__ import annotations

import os
from dataclasses import replace

from autotp.analysis.explain import priced_plan
from autotp.errors import PlanMismatchError
from autotp.planner.least_step import chunked, in_parts
from autotp.plans.options import machine_of, require_plan
from autotp.plans.plan import Plan
from costmodel import Topology
from passes.capture import Captured

__all__ = ["repriced"]


def repriced(captured: Captured, plan: Plan, topology: Topology | str | os.PathLike[str]) -> Plan:
    """The same plan, predicted for another machine.

    Args:
        captured: the model that was planned, captured for the same inputs.
        plan: the plan; its strategies, layouts, panels and chunks are kept.
        topology: the machine, a preset's name or the path of a TOML file; it must have the plan's number of devices.

    Returns:
        A plan with the same hash, the new topology, and new seconds of the step and of all operators. Bytes moved and
        memory do not depend on the machine. Nothing is searched, so nothing is proven: ``optimal`` is False and the gap 1.
        ``planning["repriced"]`` has the name of the machine that the plan was made for and its step there, in seconds.

    Raises:
        PlanMismatchError: the plan is for another model, other inputs or another number of devices.
    """
    topology = machine_of(topology)
    require_plan(plan)
    if topology.devices != plan.devices:
        raise PlanMismatchError(
            f"the plan is for {plan.devices} devices (mesh {plan.mesh_shape}), topology {topology.name!r} has "
            f"{topology.devices}; resize the topology, or make a plan for {topology.devices}"
        )
    # A bound that is the old machine's memory becomes the new one's memory; one that the user gave is kept.
    allowed = topology.device.memory if plan.memory_bound == plan.topology.device.memory else plan.memory_bound
    there = replace(plan, topology=topology, memory_bound=allowed, optimal=False, gap=1.0)
    priced = priced_plan(captured, there)
    hides = plan.schedule == "overlap"
    sums = chunked(priced, in_parts(priced, plan.chunks)) if hides else priced.sums
    costs = {node.name: cost for node, cost in priced.costs.items()}
    first = plan.planning.get("repriced", {"topology": plan.topology.name, "step_seconds": plan.predicted.step_seconds})
    return replace(
        there,
        operators=tuple(
            replace(op, seconds=costs[op.name].seconds, communication_seconds=costs[op.name].communication)
            for op in plan.operators
        ),
        predicted=sums.predicted(hides, plan.predicted.memory_bytes),
        planning={"panels": plan.planning.get("panels", 1), "repriced": first},
    )
