"""All programs of one module, each made when a call first needs it."""

from __future__ import annotations

import copy
import functools
import logging
import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from autotp.errors import AutotpError
from autotp.planner import plan_captured
from autotp.plans.families import FAMILIES
from autotp.plans.options import Options
from autotp.plans.plan import Plan
from autotp.runtime.accumulation import Accumulation
from autotp.runtime.agreement import Agreement, agreed
from autotp.runtime.compiled import Overlap
from autotp.runtime.output_guard import Relations
from autotp.runtime.programs.monitor import Monitor
from autotp.runtime.programs.program import Call, Key, Program, Unkept, named_state, require_own, run_alike, without_memory
from autotp.runtime.programs.rows import Joined, joined, known_rows, require_same_inputs
from autotp.runtime.rewrite import Rewritten, apply, parts_of, trained_bytes
from autotp.runtime.schedules import Schedules
from autotp.runtime.state import checksum, real_tensors
from autotp.runtime.strides import lying
from passes.capture import Captured, capture
from passes.capture.signature import bind, dense, flat
from passes.graph import TRACING
from passes.layouts.layout import Layout, is_shard
from passes.sharding.shard import draws_of, place_constants, used_groups
from passes.strategies.strategy import whole_layout
from passes.tensors import as_it_lies
from passes.torch_internals import set_aside, transforming, tree_map
from passes.world.world import World

__all__ = ["MOST", "Programs"]

_log = logging.getLogger("autotp.plan")

#: Default maximum number of programs of a module.
MOST = 16

#: Mode of a program -> whether modules are in training and gradients are computed.
MODES = {"train": True, "inference": False}


class Programs:
    """The programs of one module.

    Args:
        model: the copy from which programs are captured, whose modules' modes are set for each; an error if there is none.
        plan: of the first program.
        rewritten: the graph sharded by that plan.
        world: in which the graphs run.
        agreement: of the processes that run the module together.
        how: plan -> how its graphs are overlapped; None: they run unscheduled.
        training: whether each of the model's modules is in training.
        most: the maximum number of programs.
        device: on which they run.
        layouts: parameter name -> the layout in which it rests.
        even: whether devices share one pair of scheduled graphs if the shapes of their parts are equal.
        debug: whether the ranks compare every call (see ``of``), and check the numbers of every pass (see ``Monitor``).
        inputs: see `autotp.parallelize`; with ``uneven``, the ranks compare their parts' sizes in every call (``joined``).
    """

    def __init__(
        self,
        model: nn.Module | AutotpError,
        plan: Plan,
        rewritten: Rewritten,
        world: World,
        agreement: Agreement,
        how: Callable[[Plan], Overlap | None],
        *,
        training: Iterable[bool],
        most: int,
        device: torch.device,
        layouts: Mapping[str, Layout],
        even: bool = False,
        debug: bool = False,
        inputs: str = "global",
    ) -> None:
        self.model, self.plan, self.world, self.agreement, self.how = model, plan, world, agreement, how
        self.most, self.device, self.layouts, self.even, self.syncing = most, device, layouts, even, True
        self.debug, self.checked, self.changed = debug, set[Key](), Unkept(each.path for each in rewritten.captured.changed)
        self.monitor = Monitor(world, agreement) if debug and agreement.processes > 1 else None
        self.split, self.ways, self.kept = rewritten.sharding.split, rewritten.ways, rewritten.sharding.kept > 0
        self.default, self.inputs, self.varying = torch.get_default_dtype(), inputs, inputs == "uneven" and self.ways > 1
        if self.varying:
            world.join([self.split])
        self.signature = rewritten.captured.signature
        shapes = iter(rewritten.shapes)
        leaves = [(x.dtype, next(shapes)) if x.shape is not None else Key.leaf(x.value) for x in self.signature.leaves]
        first = Key(tuple(training), plan.mode == "train", tuple(leaves), self.signature.in_spec)
        self.known = {first: self._program(first, plan, rewritten)}
        self.cast, self.moved = tuple[tuple[str, torch.dtype], ...](), ""
        self.dtypes = {name: t.dtype for name, t in named_state(model).items()} if isinstance(model, nn.Module) else {}
        cut = [any(map(is_shard, rewritten.resting(name))) for name in rewritten.captured.inputs]
        self.cut = dict(zip((name for name, _ in first.tensors), cut, strict=True)) if self.split else {}

    @property
    def first(self) -> Program:
        """The program of the module's own plan."""
        return next(iter(self.known.values()))

    @property
    def every(self) -> tuple[Program, ...]:
        """All programs, in the order in which they were made; one may run calls of several kinds."""
        return tuple(dict.fromkeys(self.known.values()))

    @property
    def waiting(self) -> list[Program]:
        """The programs with gradients that are not reduced yet."""
        return [program for program in self.every if program.accumulation.waiting]

    def anew(self) -> Programs:
        """A copy for another module with the same plans, with accumulated gradients of its own."""
        made = copy.copy(self)
        own = {each: replace(each, accumulation=each.accumulation.anew()) for each in self.every}
        made.known = {key: own[each] for key, each in self.known.items()}
        return made

    @contextmanager
    def not_syncing(self) -> Iterator[None]:
        """Leaves the gradients of forward passes in this context unreduced."""
        before, self.syncing = self.syncing, False
        try:
            yield
        finally:
            self.syncing = before

    def watch(self, outputs: Sequence[Any], parts: Callable[[Program], Mapping[str, Any]]) -> None:
        """Registers hooks by which a backward pass from these outputs reduces, at its end, all gradients that wait for it.

        Args:
            outputs: of a forward pass.
            parts: program -> its placeholder -> the parameter's local part, through which gradients reach the parameter.
        """
        for program in self.every if self.syncing else ():
            if program.accumulation.used:
                program.accumulation.watch(outputs, functools.partial(parts, program))

    def key(
        self, modules: Sequence[nn.Module], args: Sequence[Any], kwargs: Mapping[str, Any], mode: str | None = None
    ) -> tuple[Key, list[Tensor]]:
        """The key of a call, and its tensors in the order of the captured graph's inputs.

        Args:
            modules: the distributed module's counterparts of ``model.modules()``, in the same order.
            args, kwargs: of the call.
            mode: one of `MODES`; by default, the modules' current modes and ``torch.is_grad_enabled()``.

        Raises:
            AutotpError: the mode is unknown, the call is under torch.func or forward-mode AD, or the module has been moved.
            TypeError: the arguments do not fit the model's signature.
        """
        if mode is not None and mode not in tuple(MODES):
            raise AutotpError(f"mode={mode!r} is unknown; choose one of {', '.join(MODES)}, or leave it out")
        if self.moved:
            raise AutotpError(self.moved)
        if transforming():
            raise AutotpError("torch.func and forward-mode gradients cannot transform what is sharded; transform the model")
        training = tuple(each.training if mode is None else MODES[mode] for each in modules)
        # A plan for inference includes no memory for gradients; gradients are still correct if they are computed.
        gradients = self.plan.mode == "train" and (torch.is_grad_enabled() if mode is None else MODES[mode])
        leaves, structure = flat(self.signature.parameters, args, kwargs)
        tensors = [dense(leaf) for leaf in leaves if isinstance(leaf, Tensor)]
        default = None if (now := torch.get_default_dtype()) == self.default else now
        kinds = tuple(map(Key.leaf, leaves))
        return Key(training, gradients, kinds, structure, False, self.cast, default, self._orders(tensors)), tensors

    def _orders(self, tensors: Sequence[Tensor], *more: Captured) -> tuple[tuple[int, ...], ...]:
        return lying(tensors, [*(each.captured for each in self.every), *more], drawn=self.world.seeds.ordered)

    def applied(self, module: nn.Module) -> None:
        """Updates the dtypes in the keys of calls after `nn.Module._apply`, and notes if the module has left its device."""
        state = named_state(module).items()
        self.cast = tuple((name, each.dtype) for name, each in state if self.dtypes.get(name, each.dtype) != each.dtype)
        where = f", and the graphs run on {self.device.type}: move the module back to call it"
        self.moved = next((f"{n} is on {t.device.type}{where}" for n, t in state if t.device.type != self.device.type), "")

    def parts(self, key: Key) -> tuple[bool, ...]:
        """Whether each tensor of a call is a part of the batch: as in the first program, else by the length of dim 0."""
        tensors = key.tensors
        lengths = parts_of([shape for _, shape in tensors])
        return tuple(self.cut.get(name, part) for (name, _), part in zip(tensors, lengths, strict=True))

    def joined(self, key: Key, args: Sequence[Any], kwargs: Mapping[str, Any], inputs: Sequence[Tensor]) -> Joined | None:
        """The call with the joined rows of all ranks; None if the calls are equal or parts must have equal sizes.

        Args:
            key, args, kwargs, inputs: of the call.

        Raises:
            PlanMismatchError: see `autotp.runtime.programs.rows.joined`.
        """
        if not self.varying or self.agreement.alike(zlib.crc32(str(key).encode())):
            return None
        (at,) = self.world.hosted
        part = tuple(at[axis] for axis in self.split)
        first = sum(at) == sum(part)
        bound = functools.partial(bind, self.signature.parameters)
        return joined(self.agreement, part, first, key, self.parts(key), (args, kwargs), bound, inputs)

    def of(
        self,
        key: Key,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        inputs: Sequence[Tensor] | None = None,
        frozen: tuple[str, ...] = (),
    ) -> Program:
        """The program of a call; it is made, on all processes, if there is none yet.

        Args:
            key: of the call.
            args, kwargs: of the call.
            inputs: its tensors, whose values are compared in the first call of every kind; None: nothing is computed.
            frozen: names of the parameters without gradients, which must be the same on all processes.

        Raises:
            AutotpError: the maximum number of programs is reached, or the program cannot be made.
            PlanMismatchError: on every process, if their calls differ, or inputs that must be equal.
        """
        unseen = inputs is not None and (key not in self.checked or self.debug)
        checked, call = unseen or key not in self.known, Call(key, frozen, self.syncing or not key.gradients)
        if checked or inputs is not None:
            self.agreement.whereabouts.called(call, checked=checked)
        if checked:
            self._check(call, inputs or ())
            self.agreement.whereabouts.agreed()
        if inputs is not None:
            self.checked.add(key)
        if key in self.known:
            return self.known[key]
        with TRACING, set_aside(), real_tensors(), torch.enable_grad():
            return self.known.get(key) or self._make(key, args, kwargs)  # another thread may have made it

    def _check(self, call: Call, inputs: Sequence[Tensor]) -> None:
        if self.agreement.processes == 1:
            return
        (at,), key = self.world.hosted, call.key
        part = () if key.whole else tuple(at[axis] for axis in self.split)
        every = self.agreement.gathered((part, str(call), [checksum(tensor) for tensor in inputs]))
        require_same_inputs(key, self.parts(key), every, None if self.inputs == "global" else self.ways)

    def _make(self, key: Key, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Program:
        split, parts = () if key.whole else self.split, self.parts(key)
        rows = functools.partial(known_rows, key, parts, self.every)
        plan, rewritten = agreed(
            self.agreement,
            lambda: self._captured(key, args, kwargs),
            lambda captured: self._planned(key, captured),
            lambda captured, plan: apply(captured, plan, split, parts, rows(captured), kept=self.kept, joined=key.whole),
        )
        self.changed |= {each.path for each in rewritten.captured.changed}
        tensors = [dense(leaf) for leaf in flat(self.signature.parameters, args, kwargs)[0] if isinstance(leaf, Tensor)]
        key = replace(key, orders=self._orders(tensors, rewritten.captured))  # this graph may be the first to need it
        mine = key, plan, rewritten.captured
        same = [each for known, each in self.known.items() if run_alike(mine, (known, each.plan, each.captured))]
        if not same and len(self.every) >= self.most:
            raise AutotpError(
                f"this call, for {key}, needs one more program than max_programs={self.most} allows. There are some for "
                f"{'; '.join(str(each.key) for each in self.every)}. Pad inputs to fewer shapes, pass a changing number as "
                "a tensor, or give autotp.parallelize a larger max_programs"
            )
        self.known[key] = same[0] if same else self._program(key, plan, rewritten)
        if same and len(self.known) % self.most == 0:
            _log.warning(
                "%d kinds of calls run %d programs. A call of a new kind takes as long as planning, even where it needs no "
                "program of its own: pass what changes from call to call as a tensor",
                len(self.known),
                len(self.every),
            )
        _log.info("program %d, for %s: step %.4g s", len(self.known), key, plan.predicted.step_seconds)
        return self.known[key]

    def _captured(self, key: Key, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Captured:
        if isinstance(self.model, AutotpError):
            raise self.model
        for module, training in zip(self.model.modules(), key.training, strict=True):
            module.training = training
        have = self.dtypes | dict(key.cast)
        for name, tensor in named_state(self.model).items():
            if tensor.dtype != have[name]:
                tensor.data = without_memory(tensor, have[name])
        ways = 1 if key.whole else self.ways
        tensors = (leaf for leaf in flat(self.signature.parameters, args, kwargs)[0] if isinstance(leaf, Tensor))
        cut = {id(leaf) for leaf, part in zip(tensors, self.parts(key), strict=True) if part and ways > 1}

        def whole(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            made = as_it_lies(leaf.detach()).requires_grad_(leaf.requires_grad)  # no inference tensor
            return torch.empty_like(made).repeat_interleave(ways, 0) if id(leaf) in cut else made

        example, named = tree_map(whole, (tuple(args), dict(kwargs)))
        made = capture(self.model, example, named, self.plan.precision, self.plan.outputs, self.plan.observe)
        return require_own(made, [each.captured for each in self.every])

    def _planned(self, key: Key, captured: Captured) -> Plan:
        """The plan of a program: with the first plan's family and memory bound, if such a plan exists."""
        whole, taken = whole_layout(len(self.plan.mesh_shape)), trained_bytes(self.first.captured, self.plan)
        first = Options.of(replace(self.plan, strategy=self.plan.strategy if self.plan.strategy in FAMILIES else "auto"))
        asked = replace(
            first,
            mode="train" if key.gradients else "inference",
            memory=max(1.0, self.plan.memory_bound - (0.0 if key.gradients else taken)),
            accumulate=self.plan.accumulate if key.gradients else 1,
            chunks=None,
            panels=self.plan.planning.get("panels"),
            constraints=(),
            reshard_after_forward=first.reshard_after_forward if key.gradients else None,
            resting={captured.buffers[name]: whole for name in captured.caches} | dict(self.layouts),
        )
        for options in (asked, replace(asked, strategy="auto")):
            try:
                return plan_captured(captured, self.plan.topology, options)
            except AutotpError as error:
                _log.info("for %s there is no plan with strategy=%r: %s", key, options.family.name, error)
        _log.warning("program for %s: it is predicted to take more than the memory bound", key)
        return plan_captured(captured, self.plan.topology, replace(asked, strategy="auto", memory=math.inf))

    def _program(self, key: Key, plan: Plan, rewritten: Rewritten) -> Program:
        captured, sharded = rewritten.captured, rewritten.graph_module
        self.world.seeds.require(draws_of(sharded))
        place_constants(sharded.graph, self.device)
        self.world.join(used_groups(sharded))
        how = self.how(plan)
        schedules = None
        if how is not None:
            schedules = Schedules(sharded, self.world, how, self.agreement, even=self.even and rewritten.even)
        apart = [i for i in range(captured.returned) if rewritten.returned(i) is not None]
        return Program(
            key,
            plan,
            rewritten,
            schedules,
            Accumulation(sharded, captured.parameters, self.world, regathers=rewritten.saves_same),
            Relations.of(captured, sharded.graph, rewritten.sharding.rows, apart),
            {name: constant.to(self.device) for name, constant in captured.constants.items()},
        )
