"""Runs cases of other programs, one after the other in one job: starting processes takes longer than most cases.

A case is a program, whose ``main`` is called, or ``program:function,function``.
"""

import importlib
import sys

import torch.distributed as dist

if __name__ == "__main__":
    # Imported first: torch modules that are imported later keep the process group as a default argument until the end.
    cases = [
        getattr(importlib.import_module(program), function)
        for program, _, functions in (case.partition(":") for case in sys.argv[1:])
        for function in (functions or "main").split(",")
    ]
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    for case in cases:
        case()
    if rank == 0:
        print("passed")
    if dist.is_initialized():
        dist.destroy_process_group()
