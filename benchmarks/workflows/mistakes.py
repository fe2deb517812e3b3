"""The last rows: mistakes, which should be errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from benchmarks.workflows.frameworks import fitted
from benchmarks.workflows.rows import ROWS, SGD, row
from benchmarks.workflows.side import Side, batch, whole
from benchmarks.workflows.state import adapted

__all__ = ["ROWS"]

MISTAKES = "Mistakes, which should be errors"


def mistake(name: str) -> Callable[[Callable[[Side, Any], Any]], Any]:
    """Adds a row that calls the decorated function, which misuses a module, after one training step."""

    def add(wrong: Callable[[Side, Any], Any]) -> Any:
        def run(side: Side) -> float | str:
            model, plain = side.model()
            module = side.distribute(model)
            side.step(module, plain, [SGD(each.parameters()) for each in (module, plain)], batch())
            found = wrong(side, module)
            return found if isinstance(found, float) else "no error"

        return row(MISTAKES, name, mistake=True)(run)

    return add


@row(MISTAKES, "ranks with other weights", mistake=True)
def _weights(side: Side) -> float | str:
    torch.manual_seed(side.rank)
    model = type(side.model()[0])
    torch.manual_seed(side.rank)
    own = model().double()
    module = side.distribute(own, broadcast=False) if side.ours else side.distribute(own)
    side.mean(module(*side.part(*batch())))
    return "no error"


@row(MISTAKES, "ranks that are given other batches as the whole one", mistake=True)
def _batches(side: Side) -> float | str:
    if not side.ours:
        return "each rank has its own"
    module = side.distribute(side.model()[0])
    module(*batch(seed=side.rank)).backward()
    return "no error"


@row(MISTAKES, "ranks that froze other parameters", mistake=True)
def _frozen(side: Side) -> float | str:
    model = side.model()[0]
    model.norm.bias.requires_grad_(side.rank == 0)
    side.mean(side.distribute(model)(*side.part(*batch())))
    return "no error"


@row(MISTAKES, "ranks that freeze other parameters after a step", mistake=True, ends=True)
def _frozen_later(side: Side) -> float | str:
    model, plain = side.model()
    module = side.distribute(model)
    side.step(module, plain, [SGD(each.parameters()) for each in (module, plain)], batch())
    module.norm.bias.requires_grad_(side.rank == 0)
    module(*side.part(*batch())).backward()
    return "no error"


@row(MISTAKES, "an optimizer of the parameters that the model had before", mistake=True)
def _old_parameters(side: Side) -> float | str:
    model, plain = side.model()
    optimizer, given = SGD(model.parameters()), model.head.weight
    module = side.distribute(model)
    found = side.step(module, plain, [optimizer, SGD(plain.parameters())], batch())
    return "no error" if given is not module.head.weight else max(found, side.apart(module, plain))


@row(MISTAKES, "ranks with other options", mistake=True)
def _options(side: Side) -> float | str:
    option = {"inputs": "local"} if side.ours else {"reshard_after_forward": False}
    module = side.distribute(side.model()[0], **(option if side.rank else {}))
    module(*side.part(*batch())).backward()
    return "no error"


mistake("a label out of range")(lambda side, m: m(*side.part(batch()[0], batch()[1] + 20)).backward())
mistake("a token out of range")(lambda side, m: m(*side.part(batch()[0] + 20, batch()[1])).backward())
mistake("an unknown keyword")(lambda side, m: m(*side.part(batch()[0]), other=1))
mistake("a float where tokens belong")(lambda side, m: m(*side.part(batch()[0].double())))
mistake("a parameter replaced")(lambda side, m: setattr(m.norm, "weight", nn.Parameter(torch.ones(16).double())))
mistake("a submodule called by itself, beside the model's forward")(lambda side, m: m.norm(torch.ones(2, 16).double()))


@mistake("a submodule replaced")
def _replaced(side: Side, module: Any) -> None:
    module.norm = nn.Identity()
    module(*side.part(*batch())).backward()


@mistake("a forward hook on a submodule that nobody asked to observe")
def _hooked(side: Side, module: Any) -> float | str:
    seen: list[int] = []
    module.blocks[0].register_forward_hook(lambda *_: seen.append(1))
    module(*side.part(*batch()))
    return 0.0 if seen else "no error"


@mistake("adapters added after distributing")
def _late(side: Side, module: Any) -> None:
    adapted(module)(*side.part(*batch())).backward()


@mistake("parameters changed between forward and backward")
def _changed(side: Side, module: Any) -> None:
    loss = module(*side.part(*batch()))
    with torch.no_grad():
        for parameter in module.parameters():
            whole(parameter)
            parameter.mul_(2)
    loss.backward()


@mistake("a step with gradients that are not reduced yet")
def _unreduced(side: Side, module: Any) -> None:
    if not side.ours:
        module.set_requires_gradient_sync(requires_gradient_sync=False)
    with module.no_sync() if side.ours else torch.enable_grad():
        module(*side.part(*batch())).backward()
    SGD(module.parameters()).step()
    if side.ours:
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.mul_(0.5)
        module(*side.part(*batch())).backward()


@row(MISTAKES, "a hook that was there before distributing, and only looks", mistake=True)
def _early(side: Side) -> float | str:
    model, _ = side.model()
    seen: list[Any] = []
    model.blocks[0].register_forward_hook(lambda m, given, made: seen.append(type(made)))
    module = side.distribute(model)
    module(*side.part(*batch()))
    return "no error" if side.ours or not seen else 0.0


@row(MISTAKES, "Lightning: a parameter that is trained beside the distributed module", mistake=True)
def _beside(side: Side) -> str:
    torch.manual_seed(side.rank)
    fitted(side, side.model()[0], beside=nn.Linear(2, 2).double())
    return "no error"
