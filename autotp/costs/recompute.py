"""Which results are recomputed for the backward pass instead of being saved for it.

Recomputation is a property of operators, as their strategies are: each of the options below is translated to a set of
operators, and prices, footprints and graphs use nothing else. Only results that the backward pass reads are recomputed:
those that the formula of a gradient reads, and those needed to recompute others.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from torch import fx

from autotp.costs.model import Model
from autotp.costs.runs import Runs
from autotp.errors import AutotpError
from passes.graph import note_of
from passes.overlap.trace import undrawn
from passes.rules.table import rule_of

__all__ = ["decided", "keeping", "recomputed_by", "undecided", "within_kernels"]

_BLOCK = re.compile(r"^(?:.*?\.)?\d+(?=\.|$)")  # the outermost element of a list of modules


def recomputed_by(model: Model, way: str | Sequence[str], checkpoints: bool = False) -> Mapping[fx.Node, bool]:
    """Recomputed operator -> whether the collectives that bring its results into other layouts are repeated.

    Args:
        model: the analysed model.
        way: ``none``; ``selective``: all but matrix products, lookups in weights and results of collectives; ``full``: all
            inside repeated blocks (elements of lists of modules; children of the model, if there are no lists) but the
            results that leave them; or the names of modules that are such blocks.
        checkpoints: whether to add the operators that the model's own ``torch.utils.checkpoint`` recomputes.

    Raises:
        AutotpError: no operator is in a module of a given name, or one in such a module draws random numbers that cannot be
            repeated.
    """
    nodes = list(model.operators)
    own = _checkpoints(nodes) if checkpoints else {}
    if way == "none" and not own:
        return {}
    fresh = set(undrawn(model.captured.graph_module.graph))
    chosen: dict[fx.Node, bool] = {}
    if way == "selective":
        chosen = {node: False for node in nodes if not _dear(model, node) and node.name not in fresh}
    elif way != "none":
        blocks = _blocks(nodes, way)
        if not isinstance(way, str) and (drawn := [n.name for n in blocks if n.name in fresh]):
            names = ", ".join(drawn)
            raise AutotpError(
                f"recompute={way}: {names} draw random numbers that cannot be repeated; leave their modules out"
            )
        chosen = dict.fromkeys(_inside(model, blocks), True)
    chosen |= {node: True for node in _inside(model, own) if not note_of(node).checkpoint.kept}
    _keep_what_is_shown(model, chosen)
    return _needed(model, chosen)


def within_kernels(model: Model) -> Model:
    """The model that also recomputes the results that stay inside compiled kernels.

    The backward pass recomputes them from tensors that are in memory anyway, in the kernels of their gradients.
    """
    runs, fresh = Runs(model), set(undrawn(model.captured.graph_module.graph))
    chosen = dict(model.recomputed)
    for node in model.operators:
        fused, shown = runs.run(node).fused, model.shown.get(node)
        if (shown is not None and shown[0] in chosen) or (fused is not None and not fused.ends and node.name not in fresh):
            chosen.setdefault(node, False)
    _keep_what_is_shown(model, chosen)
    return replace(model, recomputed=_needed(model, chosen))


def undecided(model: Model) -> Model:
    """The model in which all operators that ``full`` recomputes are undecided: the planner decides which are recomputed.

    Operators that the model already recomputes stay recomputed.
    """
    blocks = _blocks(list(model.operators), "full")
    last = {block: node for node, block in blocks.items()}
    found: dict[fx.Node, fx.Node] = {}
    for node in _inside(model, blocks):
        shown = model.shown.get(node)
        if node not in model.recomputed and (shown is None or shown[0] in found or shown[0] in model.recomputed):
            found[node] = last[blocks[node]]
    return replace(model, undecided=found)


def decided(model: Model, recomputed: Collection[fx.Node]) -> Model:
    """The model in which the given undecided operators are recomputed, as far as the backward pass reads them."""
    chosen = dict.fromkeys(recomputed, True) | dict(model.recomputed)
    _keep_what_is_shown(model, chosen)
    return replace(model, recomputed=_needed(model, chosen), undecided={})


def keeping(model: Model, nodes: Collection[fx.Node]) -> Model:
    """The model that saves the results of some recomputed ``nodes``, and recomputes no operators only for their sake."""
    chosen = {node: repeats for node, repeats in model.recomputed.items() if node not in nodes}
    _keep_what_is_shown(model, chosen)
    return replace(model, recomputed=_needed(model, chosen))


def _inside(model: Model, blocks: Mapping[fx.Node, str]) -> list[fx.Node]:
    """Operators whose results do not leave their blocks, and can be recomputed."""
    fresh = set(undrawn(model.captured.graph_module.graph))
    leaving = {
        value[0] for value, uses in model.readers.items() for user, _ in uses if blocks.get(user) != blocks.get(value[0])
    }
    return [node for node in blocks if node not in leaving and node.name not in fresh]


def _checkpoints(nodes: Sequence[fx.Node]) -> dict[fx.Node, str]:
    """Operator that ran in a checkpointed function -> the number of that call."""
    numbers = {node: note_of(node).checkpoint.number for node in nodes}
    return {node: str(number) for node, number in numbers.items() if number}


def _dear(model: Model, node: fx.Node) -> bool:
    """Whether an operator is a product, reads a weight of two dims or more, or has no rule."""
    rule, parameters = rule_of(node), model.captured.parameters
    weighs = any(operand.name in parameters and operand.meta["val"].dim() > 1 for operand in model.operands[node])
    return rule is None or rule.flop is not None or weighs


def _blocks(nodes: Sequence[fx.Node], way: str | Sequence[str]) -> dict[fx.Node, str]:
    """Operator in a block -> the name of the block."""
    paths = {node: note_of(node).module for node in nodes}
    if isinstance(way, str):
        found = {node: match.group() for node, path in paths.items() if (match := _BLOCK.match(path))}
        return found or {node: path.partition(".")[0] for node, path in paths.items() if path}
    blocks: dict[fx.Node, str] = {}
    for name in way:
        inside = [node for node, path in paths.items() if path == name or path.startswith(f"{name}.")]
        if not inside:
            known = sorted({path for path in paths.values() if path})
            raise AutotpError(f"recompute: no operator is in a module {name!r}; there are {', '.join(known)}")
        blocks |= dict.fromkeys(inside, name)
    return blocks


def _keep_what_is_shown(model: Model, chosen: dict[fx.Node, bool]) -> None:
    """Remove the bases of views that are not recomputed from ``chosen``: such a view keeps its base in memory."""
    for node, shown in reversed(model.shown.items()):
        if node not in chosen:
            chosen.pop(shown[0], None)


def _needed(model: Model, chosen: Mapping[fx.Node, bool]) -> dict[fx.Node, bool]:
    """The ``chosen`` operators whose results the backward pass reads."""
    found: dict[fx.Node, bool] = {}
    for node in reversed(list(model.operators)):
        reads = {value[0] for value in model.read_back(node, node in found)}
        if node in chosen and node in reads:  # its own result
            found[node] = chosen[node]
            reads |= {value[0] for value in model.read_back(node, recomputed=True)}
        found |= {source: chosen[source] for source in reads if source in chosen}
    return found
