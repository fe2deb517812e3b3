"""Functionalises a graph: each in-place operator becomes its out-of-place form, and later uses read its result.

A write through a view is propagated to the view's base, step by step (through a slice by ``slice_scatter`` and so on);
other views of the base are recomputed at their next use. Running the graph once on fake tensors shows which tensors share
memory. ``ExportedProgram.run_decompositions`` would functionalise too, but it drops ``torch.no_grad`` blocks and
``detach``, and so changes gradients.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from passes.capture.builder import Builder, CaptureError, operator_name
from passes.capture.functional import (
    Flow,
    Written,
    batch_norm_train,
    copying,
    diagonal_filled,
    is_write,
    no_form,
    out_of_place,
    renewed,
    writes,
)
from passes.capture.view_writes import RESHAPES, by_strides, computed, put_back, refuse_unsure, with_views
from passes.graph import annotate, arguments_of, differentiable, note_of, where
from passes.torch_internals import FakeTensorMode, OpOverload, schema, storage_id, tree_leaves

__all__ = ["functionalise"]

aten = torch.ops.aten


@dataclass
class _Value:
    """A node of the old graph: its present value in the new graph, the owner of its memory, and the source of its view."""

    now: Any
    version: int
    root: fx.Node
    source: fx.Node | None = None


def functionalise(graph: fx.Graph, mode: FakeTensorMode, kinds: Mapping[str, str]) -> tuple[fx.Graph, Written]:
    """Makes a graph without side effects.

    Args:
        graph: a flat graph whose notes say whether gradients were enabled (``Note.grad``).
        mode: the fake mode of its values.
        kinds: placeholder that may be written -> ``parameter``, ``buffer`` or ``input``. Gradients may flow through
            parameters and inputs, so these may be written only where torch allows it, or no gradient is lost.

    Returns:
        The new graph, whose last outputs are the new values of written placeholders, and a description of its writes.

    Raises:
        CaptureError: a write to a constant, or one whose gradient cannot be determined.
    """
    if not any(_has_effect(node) for node in graph.nodes):
        return graph, Written()
    return _Functionaliser(with_views(graph), mode, kinds).run()


def _has_effect(node: fx.Node) -> bool:
    return is_write(node) or operator_name(node.target) in ("aten::batch_norm", "aten::instance_norm")


class _Functionaliser:
    def __init__(self, graph: fx.Graph, mode: FakeTensorMode, kinds: Mapping[str, str]) -> None:
        self.old = graph
        self.build = Builder(mode)
        self.kinds, self.inputs = kinds, [name for name, kind in kinds.items() if kind == "input"]
        self.values: dict[fx.Node, _Value] = {}
        self.versions: dict[fx.Node, int] = {}
        self.owners: dict[int, list[fx.Node]] = {}
        self.shadows: dict[fx.Node, Any] = {}
        self.frozen, self.carried, self.strided = set[str](), set[str](), False
        self.needs_gradient = Flow(kinds).reaches

    def run(self) -> tuple[fx.Graph, Written]:
        output: list[Any] = []
        for node in self.old.nodes:
            if node.op == "placeholder":
                self.shadows[node] = node.meta["val"]
                new = self.build.placeholder(node.name, node.meta["val"])
                self.root(node, new)
            elif node.op == "output":
                output = list(map_arg(node.args[0], self.current))
            else:
                self.call(node)
        written = {n: v for n, v in self.values.items() if n.op == "placeholder" and self.versions[n]}
        places = {}
        for node, value in written.items():
            places[node.name] = len(output)
            now = value.now
            if self.kinds[node.name] == "buffer" and self.needs_gradient(now, inputs=False):
                self.carried.add(node.name)
            output.append(self.without_gradient(now, now))
        return self.build.finish(output), Written(places, frozenset(self.frozen), frozenset(self.carried), self.strided)

    # -- aliases --

    def root(self, node: fx.Node, new: Any) -> None:
        """Registers ``node`` as the owner of its memory, with value ``new``."""
        self.values[node] = _Value(new, 0, node)
        self.versions[node] = 0
        if not isinstance(self.shadows[node], Tensor):
            return
        for key in _storages(self.shadows[node]):
            self.owners.setdefault(key, []).append(node)

    def source_of(self, node: fx.Node) -> fx.Node | None:
        """The argument that the node's result aliases, if any."""
        mine = _storages(self.shadows[node])
        for argument in node.all_input_nodes:
            if mine & _storages(self.shadows[argument]):
                # The results of one operator that returns a tuple of new tensors each own their memory.
                fresh = not isinstance(self.shadows[argument], Tensor) and self.values[argument].source is None
                return None if fresh else argument
        return None

    def current(self, node: fx.Node) -> Any:
        """The value of ``node`` in the new graph, after all writes so far."""
        value = self.values[node]
        if value.version != self.versions[value.root]:
            assert value.source is not None
            self.current(value.source)
            args, kwargs = map_arg((node.args, node.kwargs), self.current)
            value.now, value.version = self.rebuilt(node, args, kwargs), self.versions[value.root]
        return value.now

    def rebuilt(self, node: fx.Node, args: Any, kwargs: Any) -> Any:
        # The new value may have other strides than the old one, for which ``view`` would fail: use ``reshape``.
        if is_write(node):
            return args[0]
        if operator_name(node.target) in RESHAPES and node.target is not aten.view.dtype:
            return self.build.emit(aten.reshape.default, (args[0], list(node.meta["val"].shape)), like=node)
        return self.build.emit(node.target, args, kwargs, like=node)

    # -- gradients --

    def without_gradient(self, new: fx.Node, like: fx.Node) -> fx.Node:
        return self.build.emit(aten.detach.default, (new,), like=like) if self.needs_gradient(new, flat=True) else new

    # -- calls and writes --

    def call(self, node: fx.Node) -> None:
        shadow_args, shadow_kwargs = map_arg((node.args, node.kwargs), self.shadows.__getitem__)
        self.shadows[node] = computed(self.build, node, shadow_args, shadow_kwargs)
        args, kwargs = map_arg((node.args, node.kwargs), self.current)
        if isinstance(node.target, OpOverload):
            if node.target is aten.batch_norm.default:
                given = arguments_of(node, args, kwargs)
                if given["training"]:
                    self.batch_norm(node, given)
                    return
            if operator_name(node.target) == "aten::instance_norm":
                given = arguments_of(node, args, kwargs)
                if given["use_input_stats"] and given["running_mean"] is not None:
                    self.instance_norm(node, given)
                    return
            if is_write(node):
                write = self.in_place if operator_name(node.target).startswith("aten::") else self.copying
                write(node, args, kwargs)
                return
        source = self.source_of(node)
        same = all(a.meta["val"] is b.meta["val"] for a, b in self._pairs(node, args, kwargs))
        new = self.build.copy(node, args, kwargs) if same else self.rebuilt(node, args, kwargs)
        if source is None:
            self.root(node, new)
        else:
            root = self.values[source].root
            self.values[node] = _Value(new, self.versions[root], root, source)

    def _pairs(self, node: fx.Node, args: Any, kwargs: Any) -> list[tuple[fx.Node, fx.Node]]:
        old: list[fx.Node] = node.all_input_nodes
        new: list[fx.Node] = []
        map_arg((args, kwargs), new.append)
        return list(zip(old, dict.fromkeys(new), strict=False))

    def batch_norm(self, node: fx.Node, given: Mapping[str, Any]) -> None:
        names = ("input", "weight", "bias", "running_mean", "running_var", "momentum", "eps")
        norm = self.build.emit(batch_norm_train, [given[n] for n in names], like=node)
        self.root(node, self.build.emit(operator.getitem, (norm, 0), like=node))
        old = arguments_of(node, node.args, dict(node.kwargs))
        for i, name in enumerate(("running_mean", "running_var"), 1):
            if given[name] is not None:
                self.write(old[name], self.build.emit(operator.getitem, (norm, i), like=node), node, aside=False)

    def instance_norm(self, node: fx.Node, given: Mapping[str, Any]) -> None:
        """The norm does not read the running statistics; these are updated by batch means of the instances' own."""
        emit = functools.partial(self.build.emit, like=node)
        x, momentum = given["input"], given["momentum"]
        alone = {**given, "running_mean": None, "running_var": None}
        self.root(node, emit(aten.instance_norm.default, list(alone.values())))
        inner = list(range(2, x.meta["val"].dim()))
        old = arguments_of(node, node.args, dict(node.kwargs))
        for name, made in (
            ("running_mean", emit(aten.mean.dim, (x, inner))),
            ("running_var", emit(aten.var.correction, (x, inner), {"correction": 1})),
        ):
            update = emit(aten.mul.Tensor, (emit(aten.mean.dim, (made, [0])), momentum))
            new = emit(aten.add.Tensor, (emit(aten.mul.Tensor, (given[name], 1 - momentum)), update))
            self.write(old[name], self.without_gradient(new, node), node, aside=False)

    def copying(self, node: fx.Node, args: Any, kwargs: Any) -> None:
        """Replaces a custom operator that writes to arguments by one that returns its results, then what it writes."""
        target = copying(node.target)
        if target is None:
            raise no_form(node)
        if note_of(node).grad and any(self.needs_gradient(self.current(n), inputs=False) for n in node.all_input_nodes):
            raise CaptureError(
                f"{where(node)}: {node.target} changes its arguments, and through such operators no gradient flows; use an "
                "out-of-place operator"
            )
        found, returns = self.build.emit(target, args, kwargs, like=node), len(schema(node.target).returns)

        def result(number: int) -> fx.Node:
            single = isinstance(found.meta["val"], Tensor)
            return found if single else self.build.emit(operator.getitem, (found, number), like=node)

        self.root(node, result(0) if returns == 1 else found)
        old = arguments_of(node, node.args, dict(node.kwargs))
        for number, position in enumerate(writes(node.target), returns):
            new, written = result(number), old[schema(node.target).arguments[position].name]
            self.check_memory(written, node)
            self.write(written, new, node, aside=not note_of(node).grad)

    def in_place(self, node: fx.Node, args: Any, kwargs: Any) -> None:
        target: Any = node.target
        reshapes = torch.Tag.inplace_view in target.tags and target is not aten.detach_.default
        where_to = [schema(target).arguments[i].name for i in writes(target)]
        written = arguments_of(node, node.args, dict(node.kwargs))[where_to[0]]
        if len(where_to) != 1 or reshapes or not isinstance(written, fx.Node):
            raise CaptureError(f"{where(node)}: {target} cannot be made out-of-place; use an out-of-place operator")
        self.check_memory(written, node)
        before = self.current(written)
        old = before.meta["val"]
        kwargs = {name: value for name, value in kwargs.items() if name != where_to[0]}
        emit, shape = functools.partial(self.build.emit, like=node), old.shape
        if target is aten.copy_.default and note_of(node).grad and self.needs_gradient(before):  # gradient becomes zero
            always = emit(aten.scalar_tensor.default, (True,), {"dtype": torch.bool, "device": old.device})
            new = emit(aten.where.self, (always, args[1], before))
        elif target is aten.copy_.default:
            new = args[1]
        elif target is aten.fill_diagonal_.default:
            new = diagonal_filled(self.build, *args, **kwargs, like=node)
        else:
            if target is aten.bernoulli_.float and len(args) == 1 and "p" not in kwargs:  # bernoulli.p has no default
                args = (*args, 0.5)
            if (operator := out_of_place(node.target)) is None:
                raise no_form(node)
            new = emit(operator, args, kwargs)
            if where_to == ["out"] and new.meta["val"].shape != shape:
                raise CaptureError(f"{where(node)}: {target} changes the shape of what it writes to")
        if (new.meta["val"].dtype, new.meta["val"].device) != (old.dtype, old.device):
            new = emit(aten.to.device, (new, old.device, old.dtype))
        if new.meta["val"].shape != shape:
            new = emit(aten.expand.default, (new, list(shape)))
        if not note_of(node).grad:
            new = self.without_gradient(new, node)
        self.write(written, new, node, aside=not note_of(node).grad)
        root = self.values[written].root
        self.values[node] = _Value(self.current(written), self.versions[root], root, written)

    def write(self, node: fx.Node, new: fx.Node, like: fx.Node, *, aside: bool) -> None:
        """Makes ``new`` the value of ``node``, and updates all values that share its memory.

        Args:
            node: the node that is written to.
            new: its new value.
            like: the operator that writes.
            aside: whether autograd does not record the write.
        """
        value = self.values[node]
        kind = self.kinds.get(value.root.name)
        self.check_writable(value.root, like)
        keeps = kind == "parameter" or (aside and kind != "input" and self.needs_gradient(self.current(value.root)))
        if value.source is None:
            if kind in ("parameter", "input"):
                new = self.given(node, new, like, aside)
            value.now = self.renewed(node, new, like) if keeps and aside and differentiable(new.meta["val"]) else new
            self.versions[node] += 1
        else:
            source = value.source
            if isinstance(self.values[source].now, fx.Node) and not isinstance(self.shadows[source], Tensor):
                whole = self.values[source].source
                assert whole is not None
                source = whole
            before = self.current(source)
            back = new if is_write(node) else put_back(self.build, node, before, new, like)
            if node.target is aten.detach.default:
                back, aside = self.without_gradient(back, like), True
            self.write(source, back, like, aside=aside)
            if keeps:
                return  # the view still has its gradient: it is recomputed at its next use
            value.now = new
        value.version = self.versions[value.root]

    def given(self, node: fx.Node, new: fx.Node, like: fx.Node, aside: bool) -> fx.Node:
        """Checks that a parameter or input may be written, and returns its new value; notes writes to frozen parameters."""
        learns, kind = self.shadows[node].requires_grad, self.kinds[node.name]
        flows = learns or (not aside and self.needs_gradient(new, inputs=False))
        if flows and (kind == "input" or not aside):
            raise CaptureError(
                f"{where(like)}: the model changes {kind} '{node.name}' in place, and a gradient flows there; clone it "
                "first, or change it under torch.no_grad()"
            )
        if note_of(like).checkpoint.number:
            raise CaptureError(
                f"{where(like)}: the model changes {kind} '{node.name}' in a checkpointed function, which torch calls "
                "again in the backward pass; change it outside"
            )
        if kind == "parameter" and not aside and differentiable(new.meta["val"]):
            self.frozen.add(node.name)
        return new

    def renewed(self, node: fx.Node, new: fx.Node, like: fx.Node) -> fx.Node:
        """The new value after a write that autograd does not record: its gradient flows to the previous value."""
        made = self.build.emit(renewed, (self.values[node].now, self.without_gradient(new, like)), like=like)
        annotate(made, grad=True)
        return made

    def check_memory(self, written: fx.Node, like: fx.Node) -> None:
        refuse_unsure(like, written, self.values[written].root)
        self.strided |= by_strides(written, like, self.values, self.inputs)

    def check_writable(self, root: fx.Node, like: fx.Node) -> None:
        shared = {n for key in _storages(self.shadows[root]) for n in self.owners[key]}
        if len(shared) > 1:
            names = ", ".join(sorted(n.name for n in shared))
            raise CaptureError(f"{where(like)}: writes to memory that {names} share; give each its own tensor")
        if root.op == "placeholder" and root.name not in self.kinds:
            raise CaptureError(
                f"{where(like)}: the model changes '{root.name}' in place, which is a constant; clone it first, or "
                "register it as a buffer"
            )


def _storages(value: Any) -> set[int]:
    return {storage_id(v) for v in tree_leaves(value) if isinstance(v, Tensor)}
