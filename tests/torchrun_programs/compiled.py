"""Regions between collectives are compiled: steps equal those of one device, in every program of a module."""

import copy
import logging

import torch
import torch.distributed as dist
from float64 import float64_mode
from overlapping import tokens

import autotp
from autotp.runtime.inductor import Region, regions


def distributed(model, args, strategy, **options):
    return autotp.parallelize(copy.deepcopy(model), None, args, strategy=strategy, mesh=(2,), compile=True, **options)


def calls(parallel):
    """The regions that a module's scheduled graphs call, in order and as often as they call them."""
    found = []
    for program in parallel.programs:
        for compiled in program.schedules.known.values():
            for runner in (compiled.forward, compiled.backward):
                module = runner.module
                nodes = module.graph.find_nodes(op="call_module", sort=True)
                found += [
                    each for each in (module.get_submodule(node.target) for node in nodes) if isinstance(each, Region)
                ]
    return found


def three_steps(model, args, strategy, **options):
    plain, parallel = copy.deepcopy(model), distributed(model, args, strategy, **options)
    assert options.get("plan") or parallel.plan.compile
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2, eps=1e-3) for m in (plain, parallel)]
    for _ in range(3):
        losses = []
        for m, optimizer in zip((plain, parallel), optimizers, strict=True):
            optimizer.zero_grad()
            losses.append(m(*args))
            losses[-1].backward()
        torch.testing.assert_close(losses[1], losses[0], rtol=1e-9, atol=1e-12)
        for name, parameter in plain.named_parameters():
            found = parallel.get_parameter(name).grad.full_tensor()
            torch.testing.assert_close(found, parameter.grad, rtol=1e-9, atol=1e-12, msg=name)
        for optimizer in optimizers:
            optimizer.step()
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(parallel.get_parameter(name).full_tensor(), parameter, rtol=1e-9, atol=1e-10, msg=name)
    return plain, parallel


def exact(model, args):
    plain, parallel = three_steps(model, args, "megatron-1d")
    used = calls(parallel)
    assert len(used) > len(set(used)) >= 2, "equal layers share regions"
    assert all(each.shared == [] for each in used), "none gives what lies in another tensor's memory"
    few = tuple(each[:4] for each in args)
    with torch.no_grad():
        torch.testing.assert_close(parallel.eval()(*few), plain.eval()(*few), rtol=1e-9, atol=1e-12)
    assert len(calls(parallel)) > len(used), "programs that are made later are compiled too"


def in_the_order_of_autograd(model, args):
    _, parallel = three_steps(model, args, "megatron-1d", schedule="none")
    assert calls(parallel)


def without_a_compiler(model, args):
    """All ranks run in eager mode if one of them cannot compile."""
    said, before = [], regions.unavailable
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("autotp.compile").addHandler(handler)
    regions.unavailable = lambda device: "no compiler here" if dist.get_rank() == 1 else ""
    _, parallel = three_steps(model, args, "megatron-1d")
    regions.unavailable = before
    assert not calls(parallel)
    assert said == ["rank 1 failed to compile, and all ranks run operators one by one: no compiler here"]


def main():
    dist.init_process_group("gloo")
    torch._inductor.config.compile_threads = 1  # the ranks are enough processes
    model, args = tokens()
    with float64_mode():
        exact(model, args)
        in_the_order_of_autograd(model, args)
        without_a_compiler(model, args)
    if dist.get_rank() == 0:
        print("passed")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
