"""Indices and labels out of range raise wherever their dim is sharded, as in the plain model.

Earlier tests looked up valid indices only: a device skips the indices of other devices, so all devices skipped an index
that no device has.
"""

import pytest
import torch
from lookups import SHARDED, WORDS, Language, changed
from thinned import SCHEDULES
from torch import nn

import autotp
from autotp.runtime.rewrite import rewrite
from passes.world import ops


@pytest.fixture(scope="module")
def sentences():
    torch.manual_seed(0)
    return torch.randint(WORDS, (4, 8)), torch.randint(WORDS, (4, 8))


@pytest.fixture(scope="module", params=["none", "overlap", "chunks"])
def distributed(request, sentences):
    model = Language().double()
    chunks = {"batch": 2} if request.param == "chunks" else {}
    plan = autotp.plan(model, autotp.Topology.flat(4), sentences, mesh=(2, 2), constraints=SHARDED, chunks=chunks)
    assert all("v" in plan.assignments[name] for name in ("embedding", "cross_entropy_loss"))
    schedule = "none" if request.param == "none" else "overlap"
    return model, autotp.simulate(model, plan, sentences, schedule=schedule)


@pytest.mark.parametrize("index", [WORDS, 10**9, -1])
def test_an_index_or_label_out_of_range_raises(distributed, sentences, index):
    ids, labels = sentences
    for given in ((changed(ids, index), labels), (ids, changed(labels, index))):
        for model in distributed:
            with pytest.raises(IndexError):
                model(*given)


def test_the_operator_and_its_range_are_named(distributed, sentences):
    ids, labels = sentences
    with pytest.raises(IndexError, match=r"index out of range: node 'embedding' in module 'table' .* takes 0 to 31"):
        distributed[1](changed(ids, WORDS), labels)


def test_ignored_labels_are_in_range(distributed, sentences):
    ids, labels = sentences
    model, simulated = distributed
    torch.testing.assert_close(simulated(ids, changed(labels, -100)), model(ids, changed(labels, -100)))


class TwoTables(nn.Module):
    def __init__(self):
        super().__init__()
        self.long, self.short, self.out = nn.Embedding(64, 16), nn.Embedding(WORDS, 16), nn.Linear(16, 8)

    def forward(self, ids):
        return self.out(self.long(ids) + self.short(ids)).square().mean()


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    "constraints", [["embedding=v@y", "embedding_1=v@y"], ["embedding_1=v@y", "embedding=m1@x"]], ids=str
)
def test_tables_of_several_sizes_are_all_checked(sentences, constraints, schedule):
    """Regression: both tables read the ids through one reshard, which once came before the second check."""
    ids, _ = sentences
    model = TwoTables().double()
    plan = autotp.plan(model, autotp.Topology.flat(4), (ids,), mesh=(2, 2), constraints=constraints, chunks={})
    simulated = autotp.simulate(model, plan, (ids,), schedule=schedule)
    torch.testing.assert_close(simulated(ids), model(ids))
    with pytest.raises(IndexError, match="'embedding_1' in module 'short'"):
        simulated(changed(ids, 40))
    targets = [node.target for node in rewrite(model, plan, (ids,)).graph_module.graph.nodes]
    assert targets.count(ops.within) == 1, "one check for all that read the ids"
    assert targets.count(ops.all_max) == 0, "no collective where every device has all ids"


class Checked(nn.Module):
    """Operators whose checks are missing in a trace."""

    def __init__(self):
        super().__init__()
        self.out = nn.Linear(8, 8)

    def forward(self, classes, matrix):
        return self.out(nn.functional.one_hot(classes, 8).double()) + self.out(torch.linalg.cholesky(matrix))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_what_a_kernel_refuses_is_refused(schedule):
    """Regression: overlapped graphs are traced, which removed unused results, such as an error's number."""
    model, args = Checked().double(), (torch.arange(8), torch.eye(8).double())
    plan = autotp.plan(model, autotp.Topology.flat(2), args, mesh=(2,))
    simulated = autotp.simulate(model, plan, args, schedule=schedule)
    torch.testing.assert_close(simulated(*args), model(*args))
    with pytest.raises(torch.linalg.LinAlgError):
        simulated(args[0], args[1] + 2 * args[1].flip(0))
    for wrong in (8, -1):
        with pytest.raises(RuntimeError):
            simulated(changed(args[0], wrong), args[1])


@pytest.mark.exact
@pytest.mark.distributed
def test_all_ranks_raise(torchrun):
    """Also if each rank has its own part of the batch, and only one part has the index."""
    done = torchrun(4, "indices.py")
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("raised on rank") == 8
