"""Constraints of a user on plans: layouts that tensors must have, and factors that mesh axes must shard in operators.

A constraint is ``PATTERN=TERMS``. The pattern names a parameter (``lm_head.weight``), an input of the model
(``input:tokens``), an output (``output:0``), modules (``h.*.mlp.c_fc``), or operators by module and kind
(``h.0.attn:softmax``) or by node (``linear_3``); ``*`` and ``?`` are wildcards. A term is a placement on a mesh axis, as
plans show it: ``Shard(0)@x`` or ``S(0)@x``, ``Replicate@y`` or ``R@y``, ``Partial@x`` or ``P@x``; ``Replicate`` alone
applies to all axes. For an operator, it is the placement of the first result; for a module, that of its last operator. Or
a term is the use of an axis: ``n@x`` shards a factor (of a product also the rows ``m``, columns ``n`` or reduction ``k``),
``-@x`` does not use the axis, and ``+i@x`` passes on partial sums of operand set i, one of those in which the operator is
linear. It applies to the operator, or to every operator in the module that has the factor. The planner decides about axes
that no term names.
"""

from __future__ import annotations

import difflib
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import numpy as np
from torch import fx

from autotp.errors import AutotpError, ConstraintError
from autotp.plans.plan import AXIS_NAMES
from costmodel.errors import shown
from passes.capture import Captured
from passes.graph import note_of
from passes.layouts.codes import DIM, PARTIAL, WHOLE
from passes.rules.factors import Operator
from passes.rules.shapes import operands_of
from passes.rules.table import name_of
from passes.strategies.space import Space
from passes.strategies.strategy import LINEAR_PREFIX

__all__ = ["Constraint", "Requirement", "minimal", "parse", "requirements"]

_TERM = re.compile(
    r"(?:(?P<shard>S|Shard)\((?P<dim>[0-9]{1,4})\)|(?P<name>[A-Za-z_][\w.]*|-|\+[0-9]{1,4}))(?:@(?P<axis>\w+))?"
)
_LONGEST = 1000  # characters of a constraint
_SAID = "terms are placements or factors on mesh axes, such as Shard(0)@x, Replicate@y or n@x"


class Term(NamedTuple):
    """A term: on ``axis`` (None: on all axes), requires ``what``: R, P, a sharded dim, a factor, ``-`` or ``+i``."""

    axis: str | None
    what: str | int


@dataclass(frozen=True, slots=True)
class Constraint:
    """A constraint: its text, and its parsed pattern and terms."""

    text: str
    pattern: str
    terms: tuple[Term, ...]


@dataclass(frozen=True, slots=True)
class Requirement:
    """What a constraint requires of one node.

    Attributes:
        side: which layout is constrained: of a parameter, its layout at ``rest``; of an operator, that of a ``result``, or
            the one that it requires of an operand (``want``).
        position: index of the result or operand.
        terms: the terms of the constraint.
    """

    side: str
    position: int
    terms: tuple[Term, ...]

    def allows(self, rows: np.ndarray, space: Space | None = None) -> np.ndarray:
        """A bool mask of the layouts of a parameter, or of the strategies of an operator, that meet the requirement.

        Args:
            rows: layout codes of the parameter, ``[L, axes]``; ignored for an operator.
            space: the strategies of the operator; None for a parameter.
        """
        if space is not None:
            rows = (space.results if self.side == "result" else space.wants)[self.position]
        found = np.ones(len(rows), bool)
        for term in self.terms:
            axes = range(rows.shape[1]) if term.axis is None else [AXIS_NAMES.index(term.axis)]
            for axis in axes:
                found &= self._holds(term, rows, axis, space)
        return found

    @staticmethod
    def _holds(term: Term, rows: np.ndarray, axis: int, space: Space | None) -> np.ndarray:
        if axis >= rows.shape[1]:  # a mesh without the axis replicates along it
            return np.full(len(rows), term.what == "R")
        codes = rows[:, axis]
        if term.what == "R":
            return np.asarray(codes == WHOLE)
        if term.what == "P":
            return np.asarray(codes == PARTIAL)
        if isinstance(term.what, int):
            return np.asarray((codes >= 0) & (codes // DIM == term.what))
        if space is None:
            return np.zeros(len(rows), bool)
        if term.what in ("-", *(name for name in space.names if name is not None and name.startswith("+"))):
            index = 0 if term.what == "-" else space.names.index(str(term.what))
            return np.asarray(space.serves[:, axis] == index)
        names = {f.name for f in space.operator.factors.values() if term.what in (f.name, f.base, f.kind)}
        return np.asarray(space.axes_of(frozenset(names))[:, axis])


def parse(given: Sequence[str] | Mapping[str, str]) -> tuple[Constraint, ...]:
    """Parses constraints, given as texts or as a mapping from patterns to terms.

    Raises:
        AutotpError: a text cannot be parsed; names the text and the expected form.
    """
    texts = [f"{pattern}={terms}" for pattern, terms in given.items()] if isinstance(given, Mapping) else given
    words = isinstance(texts, Sequence) and not isinstance(texts, str) and all(isinstance(text, str) for text in texts)
    if not words:
        raise AutotpError(f"constraints={shown(given)}: give a sequence of texts, or a mapping from patterns to terms")
    return tuple(map(_constraint, texts))


def _constraint(text: str) -> Constraint:
    if len(text) > _LONGEST:
        raise AutotpError(f"constraint {shown(text)}: it is longer than {_LONGEST:,} characters")
    pattern, _, right = text.partition("=")
    if not pattern.strip() or not right.strip():
        raise AutotpError(f"constraint {text!r}: expected PATTERN=TERMS, such as lm_head.weight=Shard(0)@x")
    terms = []
    for word in re.split(r"[\s,]+", right.strip()):
        found = _TERM.fullmatch(word)
        if found is None or (found["axis"] is not None and found["axis"] not in AXIS_NAMES):
            raise AutotpError(f"constraint {text!r}: {word!r} cannot be read; {_SAID} (axes {', '.join(AXIS_NAMES)})")
        name = {"Replicate": "R", "Partial": "P"}.get(found["name"], found["name"])
        if found["axis"] is None and name != "R":
            raise AutotpError(f"constraint {text!r}: {word!r} names no mesh axis; {_SAID}")
        terms.append(Term(found["axis"], int(found["dim"]) if found["shard"] else name))
    return Constraint(text.strip(), pattern.strip(), tuple(terms))


def requirements(
    constraints: Sequence[Constraint], captured: Captured, operators: Mapping[fx.Node, Operator]
) -> dict[fx.Node, tuple[Requirement, ...]]:
    """Node of a captured graph (an operator or a parameter) -> what the constraints require of it.

    Raises:
        AutotpError: a pattern matches nothing; suggests similar names.
    """
    found: dict[fx.Node, list[Requirement]] = defaultdict(list)
    for constraint in constraints:
        matched = False
        for node, requirement in _matches(constraint, captured, operators):
            found[node].append(requirement)
            matched = True
        if not matched:
            raise AutotpError(f"constraint {constraint.text!r}: {_unknown(constraint, captured, operators)}")
    return {node: tuple(asked) for node, asked in found.items()}


def _matches(
    constraint: Constraint, captured: Captured, operators: Mapping[fx.Node, Operator]
) -> Iterator[tuple[fx.Node, Requirement]]:
    pattern, terms = constraint.pattern, constraint.terms
    prefix, _, rest = pattern.partition(":")
    graph = captured.graph_module.graph
    if prefix == "input":
        names = {n for n in captured.inputs if fnmatchcase(n, rest)}
        for node in operators:
            for position, operand in enumerate(operands_of(node)):
                if operand.name in names:
                    yield node, Requirement("want", position, terms)
        return
    if prefix == "output":
        leaves: Sequence[Any] = graph.output_node().args[0]  # type: ignore[assignment]
        for number, leaf in enumerate(leaves[: captured.outputs]):
            if isinstance(leaf, fx.Node) and leaf in operators and fnmatchcase(str(number), rest or "*"):
                yield leaf, Requirement("result", 0, terms)
        return
    by_factor = all(not isinstance(term.what, int) and term.what not in ("R", "P") for term in terms)
    last: dict[str, fx.Node] = {}
    for node in graph.nodes:
        if node.op == "placeholder" and node.name in captured.parameters:
            if fnmatchcase(captured.parameters[node.name], pattern):
                yield node, Requirement("rest", 0, terms)
        elif node in operators:
            module, asked = note_of(node).module, Requirement("result", 0, terms)
            if fnmatchcase(node.name, pattern) or (rest and fnmatchcase(module, prefix) and rest in name_of(node)):
                yield node, asked
            elif by_factor:
                if module and fnmatchcase(module, pattern) and _serves(operators[node], terms):
                    yield node, asked
            else:
                last |= {path: node for path in _paths(module) if fnmatchcase(path, pattern)}
    for node in dict.fromkeys(last.values()):
        yield node, Requirement("result", 0, terms)


def _serves(operator: Operator, terms: Sequence[Term]) -> bool:
    names = {name for f in operator.factors.values() for name in (f.name, f.base, f.kind)} | {"-"}
    if operator.rule is not None and operator.sums:
        names |= {f"{LINEAR_PREFIX}{i}" for i in range(len(operator.rule.linear))}
    return all(term.what in names for term in terms)


def _paths(module: str) -> list[str]:
    """The path of a module, and those of the modules that contain it, outermost first."""
    parts = module.split(".") if module else []
    return [".".join(parts[: n + 1]) for n in range(len(parts))]


def _unknown(constraint: Constraint, captured: Captured, operators: Mapping[fx.Node, Operator]) -> str:
    pattern = constraint.pattern
    inside = [operator for node, operator in operators.items() if fnmatchcase(note_of(node).module, pattern)]
    if inside:
        known = {name for operator in inside for f in operator.factors.values() for name in (f.name, f.kind)} - {None, ""}
        asked = ", ".join(repr(term.what) for term in constraint.terms)
        return f"no operator in module {pattern!r} has the factors {asked}; there are {', '.join(sorted(map(str, known)))}"
    names = {*captured.parameters.values(), *(node.name for node in operators)}
    names |= {note_of(node).module for node in operators} - {""}
    names |= {f"input:{name}" for name in captured.inputs}
    close = difflib.get_close_matches(pattern[:100], sorted(names), n=3, cutoff=0.5)
    hint = f"; did you mean {' or '.join(map(repr, close))}?" if close else ""
    return f"{pattern!r} names no parameter, operator, module, input or output of the model{hint}"


def minimal(constraints: Sequence[Constraint], feasible: Callable[[Sequence[Constraint]], bool]) -> ConstraintError:
    """The error for constraints that no plan satisfies; it names a minimal infeasible subset of them.

    Args:
        constraints: constraints that are infeasible together.
        feasible: whether some plan satisfies the given constraints.
    """
    core = list(constraints)
    for constraint in constraints:
        fewer = [one for one in core if one is not constraint]
        if not feasible(fewer):
            core = fewer
    texts = tuple(one.text for one in core)
    said = ", ".join(map(repr, texts))
    if len(core) == 1:
        return ConstraintError(
            f"constraint {said} cannot hold on any mesh that is searched: no strategy of what it names does that; "
            "see the layouts that there are with `autotp explain`, or leave it out",
            texts,
        )
    return ConstraintError(f"no plan keeps all of the constraints {said}; without any one of them there is one", texts)
