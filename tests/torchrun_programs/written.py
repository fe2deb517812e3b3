"""Parameters and inputs that a model changes in place change as in the model."""

import copy
import functools

import torch
import torch.distributed as dist
from comparing import close
from torch.distributed.tensor import DTensor
from writing import WRITING, Recent, three_steps, whole

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
    what_is_carried_can_be_set(topology, (ranks,))


BEGIN = torch.linspace(0, 1, 64).double().view(8, 8)


class Hidden(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.hidden = torch.nn.GRUCell(8, 8), torch.zeros(8, 8).double()

    def forward(self, x):
        made = self.cell(x, self.hidden)
        self.hidden = made.detach()
        return made


def what_is_carried_can_be_set(topology, mesh):
    """State that is carried between calls, such as a hidden state, can be set, also if it is sharded."""
    rest, args = set(), WRITING[Recent]
    for strategy in ("zero3", "megatron-1d"):
        torch.manual_seed(1)
        model = Hidden().double()
        parallel = autotp.parallelize(copy.deepcopy(model), topology, args, strategy=strategy, mesh=mesh)
        with torch.no_grad():
            for reset in (lambda module: None, begin, lambda module: module.hidden.zero_()):
                for module in (parallel, model):
                    reset(module)
                for _ in range(2):
                    close(parallel(*args), model(*args), 1.0, strategy)
        rest.add(type(parallel.hidden))
        close(whole(parallel.hidden), model.hidden, 1.0, strategy)
        try:
            parallel.hidden = BEGIN[:4]
        except autotp.AutotpError as error:
            assert "hidden: graphs were made for torch.float64 of shape (8, 8)" in str(error), error
        else:
            raise AssertionError("a state of another shape was taken")
    assert rest == {torch.Tensor, DTensor}, rest
    assert torch.equal(BEGIN, torch.linspace(0, 1, 64).double().view(8, 8))


def begin(module):
    module.hidden = BEGIN
