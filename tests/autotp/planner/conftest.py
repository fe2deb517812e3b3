"""Random graphs that are small enough to try every assignment of strategies."""

import math
import random
from typing import NamedTuple

import pytest
import torch
from devices import SMALL
from torch import nn
from torch.nn import functional as F

import autotp
from autotp.costs.model import Model
from autotp.costs.prices import Prices
from autotp.planner import prepare
from autotp.planner.assemble import assemble
from autotp.planner.ilp import Problem
from autotp.planner.structure import structure
from autotp.plans.families import family
from passes.capture import capture

#: Maximum number of assignments for exhaustive search.
MOST = 20_000


class SmallProblem(NamedTuple):
    """A random graph on a mesh, and its integer program."""

    seed: int
    model: Model
    mesh: tuple[int, ...]
    prices: Prices
    problem: Problem


class RandomGraph(nn.Module):
    """A random small graph: linears, activations, residuals, norms, products of branches."""

    def __init__(self, seed):
        super().__init__()
        draw = random.Random(seed)
        self.width = draw.choice([4, 6, 8])
        self.steps = [draw.choice(["linear", "relu", "residual", "norm", "product"]) for _ in range(draw.choice([1, 2]))]
        self.linears = nn.ModuleList(nn.Linear(self.width, self.width, bias=draw.random() < 0.5) for _ in self.steps)
        self.norms = nn.ModuleList(nn.LayerNorm(self.width, elementwise_affine=draw.random() < 0.5) for _ in self.steps)

    def forward(self, x):
        for kind, linear, norm in zip(self.steps, self.linears, self.norms, strict=True):
            if kind == "linear":
                x = linear(x)
            elif kind == "relu":
                x = F.relu(linear(x))
            elif kind == "residual":
                x = x + linear(x)
            elif kind == "norm":
                x = norm(x)
            else:
                x = linear(x) * x
        return x


@pytest.fixture(scope="session")
def problem_of():
    """Builds the integer program of a model, for a mesh, a family and prices."""

    def build(model, mesh, name, prices):
        return assemble(structure(model, family(name).restrictions(len(mesh))[0], len(mesh)), prices).problem

    return build


@pytest.fixture(scope="session")
def small_problems(problem_of):
    """The first 24 random graphs with at most `MOST` assignments."""
    problems = []
    for seed in range(600):
        torch.manual_seed(seed)
        model = RandomGraph(seed)
        x = torch.randn(random.Random(seed).choice([4, 6]), model.width)
        captured = prepare(capture(model, (x,)))
        mesh = [(2,), (2, 2)][seed % 2]
        prices = Prices(autotp.Topology.flat(math.prod(mesh), bandwidth=1e6, latency=1e-5, device=SMALL), mesh)
        problem = problem_of(captured, mesh, "auto", prices)
        if math.prod(len(n.cost) for n in problem.nodes) <= MOST:
            problems.append(SmallProblem(seed, captured, mesh, prices, problem))
        if len(problems) == 24:
            return problems
    raise AssertionError(f"only {len(problems)} graphs are small enough")
