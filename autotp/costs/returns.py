"""The return of gradients: summed in the layout that operators return, resharded to the tensor's own, cast to its dtype."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import fx

from autotp.costs.gradients import Gradients
from autotp.costs.priced import Priced
from autotp.costs.transit import in_transit, sums_in_place, travels
from passes.graph import cast_of
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
        traced: whether sums over devices are in place.

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
        self.held.arrive(self.slots[node][position], self.size(tensor, want.gradient, None), source)

    def ended(self, node: fx.Node) -> None:
        """After an operator's turn, bring the gradients that are complete to the layouts of their tensors."""
        for value, want in self.ends[node]:
            if want is not None and (value, want) in self.held:
                self._bring(value, want)

    def _bring(self, value: Value, want: Want) -> None:
        """Cast and reshard a complete gradient to the layout of its tensor, and to the tensor's dtype at rest."""
        own, named = gradient_of(self.priced.layouts[value]), self.model.named[value]
        tensor, cast, slot = named.meta["val"], cast_of(named), (value, want)
        shape, layouts = tuple(tensor.shape), (want.gradient, own)
        if cast.back:
            self.held.move(slot, ("reduced", value), self.size(tensor, want.gradient, cast.reduced))
            slot = "reduced", value  # type: ignore[assignment]
        if own != want.gradient:
            extra = in_transit(shape, *layouts, self.mesh, False, self.traced) * cast.reduced.itemsize
            summed = self.traced and sums_in_place(shape, *layouts, self.mesh)
            self.held.move(slot, ("moved", value), self.size(tensor, own, cast.reduced), extra, in_place=summed)
            slot = "moved", value  # type: ignore[assignment]
        if cast.reduced == cast.rests:
            self.held.hand_on(slot, (value, None))
        else:
            self.held.move(slot, (value, None), self.size(tensor, own, cast.rests))
