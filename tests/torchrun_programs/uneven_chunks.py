"""Chunks with uneven parts: every rank sends the same messages in the same order, whether its parts are padded or not.

Earlier, which chunks moved together depended on which tensors were one object, and padding makes new objects.
"""

import dataclasses

import torch
from torch import nn
from torch.nn import functional as F

import autotp


class Largest(nn.Module):
    def forward(self, x):
        return F.interpolate(x, scale_factor=2.0).sum(3).amax(0)[2:5][:, 0:6:2]


def main():
    torch.manual_seed(0)
    x = torch.randn(8, 5, 4, 4, dtype=torch.float64, requires_grad=True)
    chunks = {"batch": 2, "rows": 2}
    plan = autotp.plan(Largest(), autotp.Topology.flat(2), (x,), mesh=(2,), schedule="none", chunks=chunks)
    served = dict(zip(plan.assignments, [("c",), (None,), ("d1",), ("d1",), ("d0",)], strict=True))
    operators = tuple(dataclasses.replace(op, assignment=served[op.name]) for op in plan.operators)
    plan = dataclasses.replace(plan, operators=operators)
    parallel = autotp.parallelize(Largest(), autotp.Topology.flat(2), (x,), plan=plan)
    parallel(x).square().sum().backward()
    found, x.grad = x.grad, None
    Largest()(x).square().sum().backward()
    torch.testing.assert_close(found, x.grad, rtol=1e-9, atol=1e-12)
