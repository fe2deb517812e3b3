"""``parallelize``: turns an unmodified model into this process's part of a distributed module."""

from __future__ import annotations

import functools
import itertools
import logging
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import fx, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from autotp.errors import AutotpError, PlanMismatchError
from autotp.planner import plan_captured
from autotp.plans.families import Family
from autotp.plans.options import Options, machine_of, require_no_array, require_plan
from autotp.plans.plan import Plan, check_compile, overlapping
from autotp.runtime.agreement import JobAgreement, agreed, everywhere, join_job
from autotp.runtime.durations import how_to_run
from autotp.runtime.module import DistributedModule
from autotp.runtime.programs import MOST, named_state
from autotp.runtime.rewrite import Rewritten, apply
from autotp.runtime.state import real_tensors
from costmodel import Topology
from costmodel.errors import require, shown
from passes.capture import Captured, Precision, buffered, capture, require_plain
from passes.tensors import require_memory
from passes.torch_internals import has_gradient_hooks, is_compiled
from passes.world.process import made_once
from passes.world.seeds import ways_to_draw

__all__ = ["parallelize"]

_log = logging.getLogger("autotp.compile")

#: Arguments that may differ between ranks: rank 0 makes the plan, and the ranks' graphs are compared.
_OWN = ("model", "topology", "args", "kwargs", "initialise")
#: Attribute of a parameter that a distributed module has replaced: its id, which tells it from copies, and its model's id.
_REPLACED = "_autotp_replaced"


@real_tensors()
def parallelize(
    model: nn.Module,
    topology: Topology | str | os.PathLike[str] | None = None,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    plan: Plan | None = None,
    strategy: str | Family = Options.strategy,
    mesh: Sequence[int] | None = Options.mesh,
    mode: str = Options.mode,
    memory: float | None = Options.memory,
    optimizer: str = Options.optimizer,
    accumulate: int = Options.accumulate,
    panels: int | None = Options.panels,
    chunks: Mapping[str, int] | None = Options.chunks,
    inputs: str = "global",
    schedule: str | None = None,
    compile: bool | None = None,
    constraints: Sequence[str] | Mapping[str, str] = Options.constraints,
    recompute: str | Sequence[str] = Options.recompute,
    reshard_after_forward: bool | None = Options.reshard_after_forward,
    gap: float = Options.gap,
    precision: Precision = Options.precision,
    initialise: Callable[[nn.Module], None] | None = None,
    max_programs: int = MOST,
    outputs: str | None = None,
    observe: Sequence[str] | None = None,
    broadcast: bool = True,
    dropout: str = "sharded",
    debug: bool = False,
) -> fx.GraphModule:
    """Distributes ``model`` over the processes that torchrun started.

    Rank 0 makes the plan; every rank receives it, builds its graph and verifies that all ranks hold the same plan.

    Args:
        model: any module that ``torch.export`` can export, unmodified; it may be on ``meta``.
        topology: the machine; by default the plan's, or ``Topology.local()``.
        args, kwargs: example inputs of the global batch, the same on every rank, plain or as a ``DTensor``.
        plan: an existing plan; by default, one is made with the options that follow.
        strategy, mesh, mode, memory, optimizer, accumulate, panels, chunks, constraints, precision, gap: see
            `autotp.plans.options.Options`.
        recompute, reshard_after_forward: see there.
        inputs: what each rank passes in a call. ``global``: the whole batch. ``local``: its part of the batch (dim 0, split
            over the mesh axes over which the plan splits the batch). ``uneven``: a part with any number of rows, or none.
            Every call then begins with an exchange of sizes; if they differ, the ranks gather all rows and run the program
            of the whole batch. A tensor whose dim 0 is neither as long as that of the first tensor nor a multiple of it is
            not split: all ranks pass the same. With ``local`` and ``uneven``, outputs whose dim 0 is the batch are returned
            as this rank's rows, and the backward pass averages over what ranks compute from their rows, as FSDP2 does; all
            other outputs, such as a loss, are those of the whole batch.
        schedule: ``overlap`` runs scheduled forward and backward graphs, whose collectives overlap with computation;
            ``none`` runs the sharded graph as autograd does. By default, the schedule that ``plan`` was made for; without a
            plan, ``overlap``.
        compile: whether torch's Inductor compiles the regions between collectives when a schedule is made, in the first
            call of its kind. If there is no compiler, everything runs in eager mode, and a warning says why. By default, as
            ``plan`` was made for; without a plan, false.
        initialise: a function that initialises the own parameters and buffers of a given module, for models on ``meta``.
        max_programs: the most programs that the module may have. A call in another mode, without gradients or with other
            inputs makes one when it first occurs, with the same parameters (see ``DistributedModule.programs``).
        outputs: ``whole`` (this rank's rows, with ``inputs="local"``), or ``dtensor``: outputs are ``DTensor``s in the
            layouts that the planner chose, so that a loss outside the model can be computed on sharded logits without a
            gather. By default, as ``plan`` was made for; without a plan, ``whole``.
        observe: names of modules inside the model, or shell-style patterns that match names part by part, such as
            ``["blocks.*"]``. Forward hooks registered on them are called after every forward pass, in the order of the
            model's calls, with ``DTensor``s in the layouts that the planner chose. By default, as ``plan`` was made for;
            without a plan, none.
        broadcast: whether all ranks take rank 0's parameters and buffers; if false, different values are an error.
        dropout: how random operators draw from torch's generator, in rank 0's state. ``sharded``: each part of a tensor
            draws its own numbers. ``as-single``: every device draws the whole tensor, as the model itself would in one
            process, and takes its part.
        debug: whether to check in every call, not only in a program's first, that the ranks' inputs belong together, and
            the numbers of every pass: values that ranks should hold alike must be equal, outputs not NaN, and gradients
            finite. The error names the first operator that goes wrong.

    Returns:
        A ``torch.fx.GraphModule`` with the model's call signature; train it with ``loss.backward(); optimizer.step()``.

    Raises:
        AutotpError: on every rank, when an argument is wrong or no plan fits.
        PlanMismatchError: when the plan is not for this model or this number of processes; or on every rank, when ranks
            have other options than rank 0 (except ``topology``, of which rank 0's is used) or other frozen parameters.
    """
    same = {name: value for name, value in locals().items() if name not in _OWN}
    same |= {"strategy": strategy.name if isinstance(strategy, Family) else strategy, "plan": getattr(plan, "hash", plan)}
    with suppress(Exception):  # errors of the model are raised on all ranks, once they have joined
        same |= {f"requires_grad of {name}": parameter.requires_grad for name, parameter in model.named_parameters()}
    with everywhere("cannot parallelize", _join):
        require(model, nn.Module, "the model", "an instance of torch.nn.Module")
        for name, value in same.items():
            require_no_array(name, value)
        if plan is not None:
            require_plan(plan)
        if inputs not in ("global", "local", "uneven"):
            raise AutotpError(f"inputs={shown(inputs)} is unknown; choose 'global', 'local' or 'uneven'")
        if schedule is not None:
            overlapping(schedule)
        if compile is not None:
            check_compile(compile)
        ways_to_draw(dropout, torch.device("cpu"))
        require(broadcast, bool, "broadcast", "True or False")
        require(debug, bool, "debug", "True or False")
        if initialise is not None and not callable(initialise):
            raise AutotpError(f"initialise={shown(initialise)}: give a function of a module, or None")
        if not (topology is None or isinstance(topology, (str, os.PathLike, Topology))):
            raise AutotpError(f"topology {shown(topology)}: give a preset's name, the path of a .toml file, or a Topology")
        if not isinstance(max_programs, int) or max_programs < 1:
            raise AutotpError(f"max_programs={shown(max_programs)}: give a positive number")
        kept, seen = (outputs, observe or ()) if plan is None else (plan.outputs, plan.observe)
        if outputs is not None and outputs != kept:
            asked = f"outputs={outputs!r}, but the plan is for outputs={kept!r}"
            raise AutotpError(f"{asked}: leave outputs out, or plan with it")
        if plan is not None and observe not in (None, [*seen], tuple(seen)):
            planned = f"observe={[*seen]}: leave observe out, or plan with it"
            raise AutotpError(f"observe={shown(observe)}, but the plan is for {planned}")
        options = Options(
            strategy,
            mesh=mesh,
            mode=mode,
            memory=memory,
            optimizer=optimizer,
            accumulate=accumulate,
            panels=panels,
            chunks=chunks,
            schedule=schedule or Options.schedule,
            compile=Options.compile if compile is None else compile,
            constraints=constraints,
            recompute=recompute,
            reshard_after_forward=reshard_after_forward,
            gap=gap,
            precision=precision,
            outputs=kept or Options.outputs,
            observe=seen,
        )
        if plan is not None:
            options.require(plan)
    agreement = JobAgreement(watched=True)
    agreement.require_same(same)

    def captured() -> Captured:
        require_plain(model, args, kwargs)
        require_memory(named_state(model))
        _refuse_hooks(model)
        asked = precision if plan is None else plan.asked(precision)
        return capture(model, args, kwargs, asked, Options.outputs if kept is None else kept, seen)

    def decide(graph: Captured) -> Plan:
        return _planned(graph, topology, options) if plan is None else _for_all_processes(plan, topology)

    split = () if inputs == "global" else None

    def build(graph: Captured, plan: Plan) -> Rewritten:
        return apply(graph, plan, split, kept=True)

    agreed_plan, rewritten = agreed(agreement, captured, decide, build)
    seed = agreement.decided(torch.initial_seed)
    kind, shape, axes = _kind_of_device(model), agreed_plan.mesh_shape, agreed_plan.mesh_axes
    device_mesh = made_once((kind, shape, axes), init_device_mesh, kind, shape, mesh_dim_names=axes)
    compile = agreed_plan.compile if compile is None else compile
    how = functools.partial(how_to_run, schedule=schedule or agreed_plan.schedule, compile=compile)
    wrapped = [name or "the model" for name, module in model.named_modules() if is_compiled(module)]
    if wrapped and not compile:
        _log.warning("torch.compile of %s changes nothing: give autotp.parallelize compile=True", wrapped[0])
    with buffered(model, rewritten.captured.attributes):
        made = DistributedModule(
            model,
            agreed_plan,
            rewritten,
            device_mesh,
            how,
            initialise,
            seed,
            most=max_programs,
            broadcast=broadcast,
            dropout=dropout,
            debug=debug,
            inputs=inputs,
            agreement=agreement,
        )
    for name, parameter in model.named_parameters():
        own, holder = getattr(parameter, _REPLACED, (0, 0))
        if own == id(parameter) and holder != id(model) and holder in _distributed().values():
            _log.warning(
                "%s is a parameter of another model, too, which was distributed: each has one of its own now, which are "
                "trained apart; to share it, distribute one module that has both models",
                name,
            )
        setattr(parameter, _REPLACED, (id(parameter), id(model)))
    _distributed()[made] = id(model)
    _sound_optimizers().clear()
    return made


@functools.cache
def _distributed() -> weakref.WeakKeyDictionary[nn.Module, int]:
    """Distributed module -> the id of the model that it was made from."""
    return weakref.WeakKeyDictionary()


def _join() -> None:
    instead = (
        "no process group: start the script with torchrun, e.g. torchrun --nproc-per-node 4 train.py; autotp.plan and "
        "autotp.simulate need none"
    )
    if not dist.is_initialized():
        join_job(instead, "nccl" if torch.cuda.is_available() else "gloo")


def _kind_of_device(model: nn.Module) -> str:
    """The type of device on which the module runs: ``cuda`` if the backend is NCCL or the model is on a GPU, else ``cpu``.

    Raises:
        AutotpError: several processes would exchange tensors on GPUs over gloo, most of whose collectives do not check a
            tensor's device, and crash the process.
    """
    there = any(tensor.device.type == "cuda" for tensor in itertools.chain(model.parameters(), model.buffers()))
    backend = str(dist.get_backend())
    if not torch.cuda.is_available() or not (there or "nccl" in backend):
        return "cpu"
    if backend == "gloo" and dist.get_world_size() > 1:
        raise AutotpError(
            "the model is on a GPU, but the process group's backend is gloo, which exchanges tensors of CPUs: "
            "call torch.distributed.init_process_group('nccl'), or move the model with .cpu()"
        )
    return "cuda"


def _refuse_hooks(model: nn.Module) -> None:
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if has_gradient_hooks(parameter):
            raise AutotpError(
                f"parameter {name} has a hook on its gradient, which the distributed module's would not have: register it "
                "there, where gradients are DTensors, and remove it here"
            )


@functools.cache
def _sound_optimizers() -> weakref.WeakKeyDictionary[Optimizer, int]:
    """Optimizer -> its number of parameters when it passed the check; it is checked again when that number changes.

    The first call registers a hook that checks every optimizer in its step. An optimizer of parameters that a distributed
    module has replaced would train nothing, without an error. If they have gradients, the model is trained too, on its own.
    """
    sound = weakref.WeakKeyDictionary[Optimizer, int]()

    def looked_at(optimizer: Optimizer) -> bool:
        return sound.get(optimizer) == sum(len(group["params"]) for group in optimizer.param_groups)

    def check(optimizer: Optimizer) -> None:
        named = [(*getattr(each, _REPLACED, (0, 0)), each) for group in optimizer.param_groups for each in group["params"]]
        replaced = [(model, each.grad) for own, model, each in named if own == id(each)]
        if {model for model, _ in replaced} > {model for model, gradient in replaced if gradient is not None}:
            raise AutotpError(
                "the optimizer has the parameters of the model that was distributed, not those of the distributed module, "
                "and no gradients: make it of the parameters() of what autotp.parallelize returned"
            )
        sound[optimizer] = len(named)

    def checked(optimizer: Optimizer, closure: Callable[[], Any]) -> Any:
        loss = closure()  # makes the gradients
        check(optimizer)
        return loss

    def look(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if torch.compiler.is_compiling() or looked_at(optimizer):
            return None
        closure = args[1] if args[1:] else kwargs.get("closure")
        if not callable(closure):
            return check(optimizer)
        closure = functools.partial(checked, optimizer, closure)
        return ((optimizer, closure, *args[2:]), kwargs) if args[1:] else (args, kwargs | {"closure": closure})

    register_optimizer_step_pre_hook(look)
    return sound


def _planned(captured: Captured, topology: Topology | str | os.PathLike[str] | None, options: Options) -> Plan:
    machine = Topology.local() if topology is None else machine_of(topology)
    devices = dist.get_world_size()
    if machine.devices != devices:
        raise PlanMismatchError(
            f"topology {machine.name!r} has {machine.devices} devices, but {devices} processes run; start torchrun "
            f"with {machine.devices} processes, or give topology.resized({devices})"
        )
    options.check(machine)
    return plan_captured(captured, machine, options)


def _for_all_processes(plan: Plan, topology: Topology | str | os.PathLike[str] | None) -> Plan:
    """Returns the plan, if it is for ``topology`` (if given), and for as many devices as processes run; else raises."""
    devices = dist.get_world_size()
    if topology is not None and (given := machine_of(topology)) != plan.topology:
        one, other = (f"{each.name!r} of {each.devices} devices" for each in (given, plan.topology))
        why = f"but the plan is for {other}{', with other figures' * (one == other)}: leave topology out, or plan for it"
        raise PlanMismatchError(f"topology is {one}, {why}")
    if plan.devices != devices:
        raise PlanMismatchError(
            f"the plan is for {plan.devices} devices (mesh {plan.mesh_shape}), but {devices} processes run; start "
            f"torchrun with {plan.devices} processes, or make a plan for {devices}"
        )
    return plan
