"""The rows of the table: common workflows with a distributed module, written once for both autotp and FSDP2."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from benchmarks.workflows.side import Side, batch, check

__all__ = ["ROWS", "Row"]

SGD = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)


@dataclass(frozen=True)
class Row:
    """A row of the table: a workflow.

    Attributes:
        group, name: The heading of the row and its name.
        run: Runs the workflow on one side; returns the largest difference from the plain model, or a message.
        mistake: Whether the workflow should raise an error.
        tolerance: The largest difference that counts as exact.
        ends: Whether the processes must end after the row, because the ranks' collectives no longer match.
    """

    group: str
    name: str
    run: Callable[[Side], float | str]
    mistake: bool = False
    tolerance: float = 1e-9
    ends: bool = False


ROWS: list[Row] = []


def row(group: str, name: str, **how: Any) -> Callable[[Callable[..., float | str]], Any]:
    """A decorator that adds a row to `ROWS`; ``how`` are attributes of :class:`Row`."""

    def add(run: Callable[..., float | str]) -> Any:
        ROWS.append(Row(group, name, run, **how))
        return run

    return add


def trained(
    side: Side, steps: int = 3, optimizer: Any = SGD, data: Any = None, change: Any = None, **options: Any
) -> float:
    """Trains the distributed and the plain model; returns the largest difference of losses and parameters."""
    model, plain = side.model()
    module = side.distribute(model, **options)
    for each in (module, plain):
        if change is not None:
            change(each)
    optimizers = [optimizer([p for p in each.parameters() if p.requires_grad]) for each in (module, plain)]
    found = [side.step(module, plain, optimizers, (data or batch)(seed=seed)) for seed in range(steps)]
    return max(*found, side.apart(module, plain))


def evaluated(side: Side, given: Any = None, switch: Any = None, context: Any = torch.no_grad, **named: Any) -> float:
    """Compares logits after a step, in another mode or of other inputs, and then another training step."""
    model, plain = side.model()
    module = side.distribute(model)
    side.step(module, plain, [SGD(each.parameters()) for each in (module, plain)], batch())
    ids = batch()[0] if given is None else given
    for each in (module, plain):
        (switch or (lambda m: m.eval()))(each)
    with context():
        mine, theirs = side.logits(module(*side.part(ids), **named)), plain(ids, **named)
    found = float((mine - theirs).abs().max())
    for each in (module, plain):
        each.train()
    return max(found, side.step(module, plain, [SGD(each.parameters()) for each in (module, plain)], batch(seed=1)))


MODES = "Modes and shapes"
row(MODES, "three training steps")(trained)
row(MODES, "`eval()` and `no_grad`, then training again")(evaluated)
row(MODES, "`eval()` with gradients")(functools.partial(evaluated, context=contextlib.nullcontext))
row(MODES, "`inference_mode`")(functools.partial(evaluated, context=torch.inference_mode))
row(MODES, "`no_grad` in training mode")(functools.partial(evaluated, switch=lambda m: m.train()))
row(MODES, "one block in `eval()`")(functools.partial(evaluated, switch=lambda m: m.blocks[0].eval()))
row(MODES, "a smaller last batch")(functools.partial(trained, data=lambda seed: batch(8 if seed < 2 else 4, seed=seed)))
row(MODES, "a batch that the ranks do not divide")(
    functools.partial(trained, data=lambda seed: batch(8 if seed < 2 else 5, seed=seed))
)
row(MODES, "a batch of one row")(functools.partial(trained, data=lambda seed: batch(8 if seed < 2 else 1, seed=seed)))
row(MODES, "longer sequences")(functools.partial(trained, data=lambda seed: batch(tokens=6 + 3 * seed, seed=seed)))
row(MODES, "evaluation of one short sequence")(functools.partial(evaluated, given=batch(1, 3)[0]))
row(MODES, "another value of a keyword argument")(functools.partial(evaluated, scale=2.0))
row(MODES, "parameters frozen after distributing")(
    functools.partial(trained, change=lambda m: m.blocks[0].requires_grad_(False))
)


@row(MODES, "dropout: two passes differ, evaluation is exact")
def _dropout(side: Side) -> float:
    model, plain = side.model(0.5)
    module = side.distribute(model)
    ids, labels = side.part(*batch())
    check(float(side.mean(module(ids, labels))) != float(side.mean(module(ids, labels))))
    with torch.no_grad():
        return float((side.logits(module.eval()(ids)) - plain.eval()(batch()[0])).abs().max())


@row(MODES, "batch norm's running statistics are the whole batch's")
def _batch_norm(side: Side) -> float:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)).double(), torch.randn(8, 4).double()
    plain = copy.deepcopy(model)
    module = side.distribute(model, (x,))
    for each, given in ((module, side.part(x)), (plain, (x,))):
        each(*given).square().mean().backward()
    mine, theirs = (each.get_buffer("1.running_mean") for each in (module, plain))
    return float((mine - theirs).abs().max())


@row(MODES, "each rank has a part of another size")
def _uneven(side: Side) -> float:
    model, plain = side.model()
    module = side.distribute(model, inputs="uneven") if side.ours else side.distribute(model)
    optimizers = [SGD(each.parameters()) for each in (module, plain)]
    for seed in range(3):
        sizes = [1 + (rank + seed) % 3 for rank in range(side.ranks)]
        ids, labels = batch(sum(sizes), seed=seed)
        part = [each.split(sizes)[side.rank] for each in (ids, labels)]
        for each, (given, wanted), ways in ((module, part, side.ranks), (plain, (ids, labels), 1)):
            sums = nn.functional.cross_entropy(each(given).flatten(0, 1), wanted.flatten(), reduction="sum")
            (sums * ways / labels.numel()).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return side.apart(module, plain)


@row(MODES, 'two modules in a chain, each rank with its own rows (autotp: `inputs="local"`)')
def _chained(side: Side) -> float:
    torch.manual_seed(0)
    models = [nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)).double() for _ in range(2)]
    plain, x = copy.deepcopy(models), torch.randn(8, 8).double()
    options = {"inputs": "local"} if side.ours else {}
    modules = [side.distribute(model, (x,), **options) for model in models]
    own = x.tensor_split(side.ranks)[side.rank]
    for (first, second), given in ((modules, own), (plain, x)):
        second(first(second(first(given)))).square().mean().backward()
    return max(side.apart(mine, theirs, gradients=True) for mine, theirs in zip(modules, plain, strict=True))


ACCUMULATION = "Accumulation"


def accumulated(side: Side, rows: tuple[int, ...] = (4, 4), sync: bool = False, drop: bool = False) -> float:
    """Compares gradients that are accumulated over micro-batches of these numbers of rows."""
    model, plain = side.model()
    module = side.distribute(model)
    for number, size in enumerate(rows):
        data = batch(size, seed=number)
        inner = number + 1 < len(rows) and not sync
        if not side.ours:
            module.set_requires_gradient_sync(not inner)
        with module.no_sync() if side.ours and inner else contextlib.nullcontext():
            module(*side.part(*data)).backward()
        plain(*data).backward()
        if drop and number == 0:
            module.zero_grad()
            plain.zero_grad()
    return side.apart(module, plain, gradients=True)


row(ACCUMULATION, "two micro-batches, each reduced")(functools.partial(accumulated, sync=True))
row(ACCUMULATION, "unreduced inner micro-batches (`no_sync`, `set_requires_gradient_sync`)")(
    functools.partial(accumulated, rows=(4, 4, 4))
)
row(ACCUMULATION, "micro-batches of different sizes")(functools.partial(accumulated, rows=(8, 4, 4)))
row(ACCUMULATION, "`zero_grad()` between them")(functools.partial(accumulated, rows=(4, 4, 4), sync=True, drop=True))

OPTIMIZERS = "Optimizers"
for _name, _options in {
    "SGD": {"momentum": 0.9, "nesterov": True}, "Adam": {}, "AdamW": {}, "Adamax": {}, "NAdam": {}, "RAdam": {}, "ASGD": {},
    "Adagrad": {}, "Adadelta": {}, "RMSprop": {}, "Rprop": {}, "Adafactor": {},
}.items():  # fmt: skip
    row(OPTIMIZERS, f"`{_name}`", tolerance=1e-6)(
        functools.partial(trained, optimizer=functools.partial(getattr(torch.optim, _name), lr=1e-2, **_options))
    )
row(OPTIMIZERS, "`AdamW(foreach=True)`", tolerance=1e-6)(
    functools.partial(trained, optimizer=functools.partial(torch.optim.AdamW, foreach=True))
)
row(OPTIMIZERS, "`AdamW(fused=True)`", tolerance=1e-6)(
    functools.partial(trained, optimizer=functools.partial(torch.optim.AdamW, fused=True))
)


def _stepped(side: Side, between: Callable[[Any, Any], None], groups: bool = False) -> float:
    """Compares parameters after steps with an action between the backward pass and the update."""
    model, plain = side.model()
    module = side.distribute(model)
    kinds = []
    for each in (module, plain):
        decay, rest = ([p for p in each.parameters() if (p.dim() > 1) == wide] for wide in (True, False))
        kinds.append([{"params": decay, "weight_decay": 0.1}, {"params": rest}] if groups else [*each.parameters()])
    optimizers = [SGD(kind) for kind in kinds]
    schedulers = [torch.optim.lr_scheduler.CosineAnnealingLR(each, 4) for each in optimizers]
    for seed in range(3):
        for each, given, optimizer, scheduler in zip(
            (module, plain), (side.part(*batch(seed=seed)), batch(seed=seed)), optimizers, schedulers, strict=True
        ):
            optimizer.zero_grad()
            each(*given).backward()
            between(each, optimizer)
            optimizer.step()
            scheduler.step()
    return side.apart(module, plain)


row(OPTIMIZERS, "parameter groups and a schedule of the rate")(lambda side: _stepped(side, lambda *_: None, groups=True))
row(OPTIMIZERS, "`clip_grad_norm_`")(
    lambda side: _stepped(side, lambda m, _: nn.utils.clip_grad_norm_(m.parameters(), 0.1))
)
row(OPTIMIZERS, "`clip_grad_value_`")(
    lambda side: _stepped(side, lambda m, _: nn.utils.clip_grad_value_(m.parameters(), 1e-3))
)


PRECISION = "Precision"


@row(PRECISION, "bfloat16 compute, float32 weights and reductions", tolerance=0.05)
def _mixed(side: Side) -> float:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    torch.manual_seed(0)
    model = side.model()[0].float()
    plain = copy.deepcopy(model)
    module = side.distribute(model, precision=policy) if side.ours else side.distribute(model, mp_policy=policy)
    for each, given in ((module, side.part(*batch())), (plain, batch())):
        each(*given).backward()
    check(all(p.dtype == p.grad.dtype == torch.float32 for p in module.parameters()))
    return side.apart(module, plain, gradients=True)


@row(PRECISION, "`torch.amp.GradScaler`")
def _scaled(side: Side) -> float:
    model, plain = side.model()
    module = side.distribute(model)
    for each, given in ((module, side.part(*batch())), (plain, batch())):
        optimizer, scaler = SGD(each.parameters()), torch.amp.GradScaler("cpu", init_scale=4.0)
        scaler.scale(each(*given)).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    return side.apart(module, plain)


@row(PRECISION, "`torch.autocast` around the module", tolerance=0.05)
def _autocast(side: Side) -> float:
    model, plain = (each.float() for each in side.model())
    module = side.distribute(model)
    for each, given in ((module, side.part(*batch())), (plain, batch())):
        with torch.autocast("cpu", torch.bfloat16):
            loss = each(*given)
        loss.backward()
    return side.apart(module, plain, gradients=True)


@row(PRECISION, "`module.to(torch.float32)` between steps", tolerance=1e-5)
def _cast(side: Side) -> float:
    model, plain = side.model()
    module = side.distribute(model)
    side.step(module, plain, [SGD(each.parameters()) for each in (module, plain)], batch())
    for each in (module, plain):
        each.to(torch.float32)
    found = side.step(module, plain, [SGD(each.parameters()) for each in (module, plain)], batch(seed=1))
    check(all(p.dtype == torch.float32 for p in module.parameters()))
    return max(found, side.apart(module, plain))
