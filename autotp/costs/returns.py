"""The return of gradients: summed in the layout that operators return, resharded to the tensor's own, cast to its dtype."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence

import torch
from torch import fx

from autotp.costs.gradients import Gradients
from autotp.costs.priced import Priced
from autotp.costs.transit import before_gathering, in_transit, sums_in_place, travels
from passes.graph import Cast, cast_of
from passes.layouts.layout import Layout
from passes.rules.factors import Value, value_of
from passes.rules.table import rule_of
from passes.strategies.strategy import Want, gradient_of

__all__ = ["Returns", "Slot"]

#: A tensor and, if its gradient has to be resharded or cast, what the operators that return it require of the tensor.
Slot = tuple[Value, Want | None]
#: Bytes of one device's part of a tensor in a layout, in its own dtype or another.
Size = Callable[[torch.Tensor, Layout, torch.dtype | None], float]


class Returns:
    """The gradients of a plan's backward pass.

    Args:
        priced: the plan's strategies and layouts.
        operands: operator -> its operands.
        size: returns the bytes of tensors.
        reach: called with the bytes that are held temporarily in addition to ``held.total``.
        traced: whether the backward pass is a traced graph, in which sums over devices are in place.

    Attributes:
        held: the gradients held, by slot.
    """

    def __init__(
        self,
        priced: Priced,
        operands: Mapping[fx.Node, Sequence[fx.Node]],
        size: Size,
        reach: Callable[[float], None],
        *,
        traced: bool,
    ) -> None:
        self.priced, self.model, self.operands = priced, priced.model, operands
        self.mesh, self.size, self.traced = priced.prices.mesh, size, traced
        self.held = Gradients(reach)
        self.waiting: dict[Value, float] = {}
        self.slots: dict[fx.Node, list[Slot]] = {}
        self.ends: dict[fx.Node, dict[Slot, None]] = defaultdict(dict)
        seen: set[Slot] = set()
        for node, each in operands.items():
            wants = priced.strategies[node.name].wants
            self.slots[node] = [self._slot(value_of(operand), want) for operand, want in zip(each, wants, strict=True)]
            for slot in self.slots[node]:  # the first operator with a slot is the last to return its gradient
                if slot not in seen:
                    seen.add(slot)
                    self.ends[node][slot] = None

    def _slot(self, value: Value, want: Want) -> Slot:
        """The slot in which a gradient is summed, with those of other operators that require the tensor in this way."""
        have = self.priced.layouts[value]
        stays = want.layout == have and want.gradient == gradient_of(have)
        return value, None if stays and not cast_of(self.model.named[value]).changes else want

    def wait(self) -> None:
        """Add the gradients of parameters from earlier micro-batches, unreduced if the reduction communicates."""
        waiting: dict[Slot, float] = {}
        parameters = self.model.captured.parameters
        for value, want in (slot for slots in self.slots.values() for slot in slots):
            if value[0].name not in parameters or value not in self.model.trained:
                continue
            own, tensor = gradient_of(self.priced.layouts[value]), self.model.named[value].meta["val"]
            gradient = own if want is None else want.gradient
            waits = travels(tuple(tensor.shape), gradient, own, self.mesh) and not cast_of(value[0]).changes
            slot = (value, want) if waits else (value, None)
            waiting[slot] = self.size(tensor, gradient if waits else own, cast_of(value[0]).rests)
        for slot, size in waiting.items():
            self.held.arrive(slot, size)

    def arrive(self, node: fx.Node, position: int, result: torch.Tensor, *, shares: bool) -> None:
        """Add an operator's gradient of an operand, in the memory of the result's gradient if it may share that.

        Args:
            node, position: the operator, and the position of the operand.
            result: the operator's first result.
            shares: whether it is the only one.
        """
        tensor, rule = self.operands[node][position].meta["val"], rule_of(node)
        want, source = self.priced.strategies[node.name].wants[position], None
        if shares and rule is not None and (rule.hands_on or rule.view) and tensor.numel() == result.numel():
            source = (node, 0), None
        slot = self.slots[node][position]
        self.held.arrive(slot, self.size(tensor, want.gradient, None), source)
        if slot[1] is None:
            self.begun(slot[0])

    def at_once(self, node: fx.Node, position: int) -> float:
        """Bytes of an operator's gradients of operands from this one on, if they need memory of their own."""
        wants, operands, rule = self.priced.strategies[node.name].wants, self.operands[node], rule_of(node)
        if rule is not None and (rule.hands_on or rule.view):
            return 0.0
        return sum(
            self.size(operands[i].meta["val"], wants[i].gradient, None)
            for i in range(position, len(operands))
            if value_of(operands[i]) in self.model.trained
        )

    def ended(self, node: fx.Node) -> None:
        """After an operator's turn, bring the gradients that are complete to the layouts of their tensors.

        A traced graph gathers a gradient when that is first read: with the next one of the tensor, or for its operator
        (`begun`).
        """
        for value, want in self.ends[node]:
            if want is None or (value, want) not in self.held:
                continue
            parts, slot = None, self._cast(value, want)
            alone = (value, None) not in self.held and value not in self.waiting
            if self.traced and alone and value[0].op != "placeholder":  # those of parameters are returned
                parts = before_gathering(self._shape(value), want.gradient, self._own(value), self.mesh)
            if parts is None:
                self._bring(slot, value, want)
                self.begun(value)
                continue
            size, extra, self.waiting[value] = (each * self._cast_of(value).reduced.itemsize for each in parts)
            self.held.move(slot, ("scattered", value), size, extra, in_place=size == self._size(value, want.gradient))

    def begun(self, value: Value) -> None:
        """Gather the gradient of a tensor, if that has not been done yet."""
        extra = self.waiting.pop(value, None)
        if extra is not None:
            self.held.move(("scattered", value), ("moved", value), self._size(value, self._own(value)), extra)
            self._rest(("moved", value), value)

    def _shape(self, value: Value) -> tuple[int, ...]:
        return tuple(self.model.named[value].meta["val"].shape)

    def _cast_of(self, value: Value) -> Cast:
        return cast_of(self.model.named[value])

    def _own(self, value: Value) -> Layout:
        return gradient_of(self.priced.layouts[value])

    def _size(self, value: Value, layout: Layout) -> float:
        """Bytes of a gradient while it is moved."""
        return self.size(self.model.named[value].meta["val"], layout, self._cast_of(value).reduced)

    def _cast(self, value: Value, want: Want) -> Hashable:
        """Cast a complete gradient to the dtype in which it is moved. Returns its slot."""
        if not self._cast_of(value).back:
            return value, want
        self.held.move((value, want), ("reduced", value), self._size(value, want.gradient))
        return "reduced", value

    def _bring(self, slot: Hashable, value: Value, want: Want) -> None:
        """Reshard a complete gradient to the layout of its tensor, and cast it to the tensor's dtype at rest."""
        layouts = want.gradient, self._own(value)
        if layouts[0] != layouts[1]:
            shape, itemsize = self._shape(value), self._cast_of(value).reduced.itemsize
            extra = in_transit(shape, *layouts, self.mesh, False, self.traced) * itemsize
            summed = self.traced and sums_in_place(shape, *layouts, self.mesh)
            self.held.move(slot, ("moved", value), self._size(value, layouts[1]), extra, in_place=summed)
            slot = "moved", value
        self._rest(slot, value)

    def _rest(self, slot: Hashable, value: Value) -> None:
        """Cast a gradient in the layout of its tensor to the tensor's dtype at rest."""
        tensor, cast = self.model.named[value].meta["val"], self._cast_of(value)
        if cast.reduced == cast.rests:
            self.held.hand_on(slot, (value, None))
        else:
            self.held.move(slot, (value, None), self.size(tensor, self._own(value), cast.rests))
