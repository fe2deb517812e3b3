"""Lower bounds on the memory and on the time of every plan of a model, whatever its mesh and strategies.

A device holds at least its share of every live tensor. Parameters, optimizer state and inputs are live throughout.
When the backward pass begins, so are the tensors that gradients read and that cannot be recomputed; when it ends, the
gradients of parameters are. No integer program is needed here, so a job that cannot fit is recognized immediately.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import numpy as np
import torch
from torch import fx

from autotp.costs.model import Model
from autotp.costs.prices import Prices
from autotp.costs.runs import Run, Runs
from passes.graph import cast_of
from passes.rules.factors import Operator, Value, value_of
from passes.rules.kept import kept_lowered
from passes.rules.shapes import results_of
from passes.rules.table import flop_of, rule_of
from passes.strategies.space import Space

__all__ = ["kernels", "least_bytes", "least_host", "least_seconds", "shared_seconds"]


def least_bytes(model: Model, prices: Prices) -> float:
    """A lower bound on the peak memory of every plan, in bytes per device.

    Args:
        model: the analysed model; saved results of undecided operators do not count.
        prices: the prices on any mesh of all devices.
    """
    resting = returned = 0.0
    last = next(iter(model.operators), None)
    for node in model.captured.graph_module.graph.find_nodes(op="placeholder"):
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor):
            continue
        itemsize = cast_of(node).rests.itemsize
        size = float(value.numel() * itemsize)
        trains = prices.train and node.name in model.captured.parameters
        resting += float(prices.states(np.array(value.numel()), itemsize)) - size if trains else size
        if trains and any(
            user in model.differentiated and user is not last for user, _ in model.readers.get((node, 0), ())
        ):
            returned += size
    saved = _saved(model) if prices.train else 0.0
    return (resting + max(saved, returned)) / prices.topology.devices * (1 + prices.spare)


def _saved(model: Model) -> float:
    """Bytes of the storages that the backward pass reads, whatever is recomputed; each counts as its largest tensor."""
    found: dict[Value, float] = defaultdict(float)
    for node in model.operators:
        for value in _read(model, node):
            root = model.root(value)
            if any(
                one.op == "placeholder" or one in model.undecided or one in model.recomputed for one in (value[0], root[0])
            ):
                continue
            size = float(min(results_of(one)[number].nbytes for one, number in (value, root)))
            found[root] = max(size, found[root])
    return sum(found.values())


def _read(model: Model, node: fx.Node) -> list[Value]:
    """The tensors that an operator's gradients read, or read copies of equal size of, also if a lowering replaces it."""
    kept, rule = model.kept(node), rule_of(node)
    positions = kept.operands
    if rule is not None and rule.inner:
        lowered = kept_lowered(node)
        positions = tuple(at for at in positions if at == 0 and (lowered.operands or lowered.besides))
    found = [value_of(model.operands[node][at]) for at in positions]
    return [*found, (node, 0)] if kept.results and not (rule is not None and rule.inner) else found


def least_seconds(model: Model, prices: Prices, longer: float = 1.0) -> float:
    """A lower bound on the step time of every plan, in seconds: work is shared evenly, in kernels as fast as whole ones.

    Args:
        model: the analysed model.
        prices: the prices on any mesh of all devices.
        longer: a factor on the time of both passes; for plans in chunks, `costmodel.overlap.CHUNKED`.
    """
    devices, known, runs = prices.topology.devices, dict[fx.Node, float](), Runs(model)
    for node in model.operators:
        if (stand := model.stands[node]) not in known:
            ways = [run for run in (runs.run(stand), runs.rerun(stand)) if run is not None]
            known[stand] = min(shared_seconds(prices, model.operators[stand], flop_of(stand), run) for run in ways)
    computing = prices.accumulate * sum(known[model.stands[node]] for node in model.operators)
    given = model.captured.graph_module.graph.find_nodes(op="placeholder")
    sizes = [(n.meta["val"].numel(), cast_of(n).rests.itemsize) for n in given if n.name in model.captured.parameters]
    updated = sum(prices.update_bytes(count / devices, itemsize) for count, itemsize in sizes)
    return longer * computing + float(prices.updating(updated))


def shared_seconds(prices: Prices, operator: Operator, flop: float, run: Run) -> float:
    """Seconds of an operator and its gradients if all devices share them evenly, in kernels as fast as whole ones."""
    alone = Space.of(operator, [None], np.zeros((1, len(prices.mesh)), np.int64))
    work, devices = prices.work(alone, flop, run), prices.topology.devices
    if work is None:
        return 0.0
    share = replace(work, flop=work.flop / devices, bytes=work.bytes / devices)
    return float(np.asarray(share.seconds(prices.topology.device)).item())


def kernels(runs: Runs, node: fx.Node) -> float:
    """The number of kernels of an operator and its gradients; 0 for a view, or if it is fused into another's kernel."""
    rule = rule_of(node)
    return 0.0 if rule is not None and rule.view else runs.run(node).kernels(node)


def least_host(model: Model, prices: Prices) -> float:
    """A lower bound on the seconds in which the host launches the kernels of a step, however the model is sharded."""
    if not prices.topology.device.host:
        return 0.0
    runs = Runs(model)
    return prices.topology.device.host * prices.accumulate * sum(kernels(runs, node) for node in model.operators)
