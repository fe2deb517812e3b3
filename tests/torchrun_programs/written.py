"""Parameters and inputs that a model changes in place are changed as by the model."""

import functools

import torch
import torch.distributed as dist
from writing import WRITING, three_steps

import autotp


def main():
    ranks = dist.get_world_size()
    topology = autotp.Topology.flat(ranks)
    for kind, args in WRITING.items():
        torch.manual_seed(1)
        model = kind().double()
        given = tuple(each.clone() for each in args)
        for strategy, schedule in (("zero3", "overlap"), ("megatron-1d", "none"), ("megatron-1d", "overlap")):
            asked = {"strategy": strategy, "mesh": (ranks,), "schedule": schedule}
            three_steps(model, args, functools.partial(autotp.parallelize, topology=topology, args=given, **asked))
