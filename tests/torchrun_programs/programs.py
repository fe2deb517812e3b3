"""Training loops with evaluation, smaller batches and parts of the batch; what ranks disagree about is an error on all."""

import copy
import itertools
from contextlib import nullcontext
from unittest import TestCase

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import loss_parallel
from torch.utils.data import DataLoader, TensorDataset

import autotp

SIX = {"rtol": 1e-9, "atol": 1e-12}


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.drop, self.second = nn.Linear(8, 16), nn.Dropout(0.0), nn.Linear(16, 4)

    def forward(self, x, labels=None):
        scores = self.second(self.drop(torch.relu(self.first(x))))
        return scores if labels is None else nn.functional.cross_entropy(scores, labels)


def data(count=20):
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(count, 8, generator=generator, dtype=torch.float64)
    return TensorDataset(rows, torch.randint(4, (count,), generator=generator))


def parts_of_the_batch():
    """Each rank loads its own part of the batch; the last batch is smaller, and evaluation takes the whole dataset."""
    torch.manual_seed(0)
    model, dataset, ranks = Classifier().double(), data(), dist.get_world_size()
    plain = copy.deepcopy(model)
    example = dataset[:8]
    parallel = autotp.parallelize(model, None, example, strategy="data", mesh=(ranks,), inputs="local")
    assert (parallel.plan.batch_ways, parallel.batch_rank) == (ranks, dist.get_rank())
    assert autotp.Plan.from_json(parallel.plan.to_json()).batch_axes == ("x",)
    sampler = parallel.sampler(dataset, shuffle=False)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (parallel, plain)]
    for number, (x, y) in enumerate(DataLoader(dataset, batch_size=8 // ranks, sampler=sampler)):
        rows = slice(8 * number, 8 * number + 8)
        for module, batch, optimizer in zip((parallel, plain), ((x, y), dataset[rows]), optimizers, strict=True):
            optimizer.zero_grad()
            module(*batch).backward()
            optimizer.step()
    assert len(parallel.programs) == 2, "20 rows are two batches of 8, and one of 4"
    for (name, mine), theirs in zip(parallel.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.full_tensor(), theirs, **SIX, msg=name)
    whole, _ = dataset[:]
    mine = whole[parallel.batch_rank :: ranks]
    with torch.no_grad():
        scores = parallel.eval()(mine)
    torch.testing.assert_close(scores, plain.eval()(mine), **SIX)


class Several(nn.Module):
    """Outputs whose batch is the first dim, alone or merged with another, or another dim, and outputs without a batch."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        y = self.second(torch.tanh(self.first(x)))
        outputs = {"rows": y, "tokens": y.flatten(0, 1), "firsts": y[:, 0], "given": x, "ids": y.argmax(-1)}
        return outputs | {"turned": y.transpose(0, 1), "loss": y.square().mean(), "weight": self.second.weight * 1}


def rows_of_the_batch():
    """Each rank gets its own rows back; what it computes from them is averaged, as with FSDP2. A weight has no rows."""
    torch.manual_seed(0)
    model, x, ranks = Several().double(), torch.randn(8, 8, 8, dtype=torch.float64), dist.get_world_size()
    for (strategy, mesh), schedule in itertools.product(
        [("zero3", (ranks,)), ("atp", (2, ranks // 2))], ("overlap", "none")
    ):
        plain = copy.deepcopy(model)
        options = {"strategy": strategy, "mesh": mesh, "inputs": "local", "schedule": schedule}
        parallel = autotp.parallelize(model, None, (x,), **options)
        ways, rank = parallel.plan.batch_ways, parallel.batch_rank
        assert strategy != "zero3" or ways == ranks
        for rows in (8, 4):
            part = slice(rows // ways * rank, rows // ways * (rank + 1))
            mine, theirs = parallel(x[:rows][part]), plain(x[:rows])
            for name, value in theirs.items():
                per_row = value.shape[0] // rows if name in ("rows", "tokens", "firsts", "given", "ids") else 0
                expected = value[part.start * per_row : part.stop * per_row] if per_row else value
                torch.testing.assert_close(mine[name], expected, **SIX, msg=f"{strategy} {schedule} {name}")
            for each in (mine, theirs):
                terms = [each[name].sin().mean() for name in ("rows", "tokens", "firsts", "turned", "weight")]
                (sum(terms) + each["loss"]).backward()
            mine["rows"].mul_(2)  # allowed, as for any output
        for (name, own), other in zip(parallel.named_parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(own.grad.full_tensor(), other.grad, **SIX, msg=f"{strategy} {schedule} {name}")
    parallel = autotp.parallelize(model, None, (x,), strategy="zero3", mesh=(ranks,), inputs="local", schedule="none")
    made = parallel(x.tensor_split(ranks)[dist.get_rank()])
    made["rows"].register_hook(lambda gradient: None)
    with pytest.raises(autotp.AutotpError, match="output 0 has a hook or retains its gradient, and output 6 is computed"):
        made["loss"].backward()


def through_several_modules():
    """A rank's rows come from a layer that DDP would average, and pass through two modules, one of them repeatedly."""
    torch.manual_seed(0)
    ranks = dist.get_world_size()
    x = torch.randn(8, 8, dtype=torch.float64)
    layers = [nn.Linear(8, 8).double() for _ in range(3)]
    part = slice(8 // ranks * dist.get_rank(), 8 // ranks * (dist.get_rank() + 1))
    for inputs in ("local", "uneven"):
        front, *others = (copy.deepcopy(layer) for layer in layers)
        step, last = (autotp.parallelize(each, None, (x,), strategy="zero3", inputs=inputs) for each in others)
        plain = copy.deepcopy(layers)
        for own, (first, carried, end) in ((x[part], (front, step, last)), (x, plain)):
            state = first(own)
            for _ in range(3):
                state = carried(state).tanh()
            end(state).square().mean().backward()
        for parameter in front.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= ranks
        for mine, theirs in zip((front, step, last), plain, strict=True):
            for own, other in zip(mine.parameters(), theirs.parameters(), strict=True):
                found = own.grad.full_tensor() if isinstance(own.grad, DTensor) else own.grad
                torch.testing.assert_close(found, other.grad, **SIX, msg=inputs)


def parts_of_other_sizes():
    """Ranks bring any number of rows, even none: results are those of the whole batch, and each gets its own rows back."""
    torch.manual_seed(0)
    model, ranks = Several().double(), dist.get_world_size()
    for (strategy, mesh), outputs in itertools.product(
        [("zero3", (ranks,)), ("megatron-1d", (2, ranks // 2))], ("whole", "dtensor")
    ):
        plain, options = copy.deepcopy(model), {"strategy": strategy, "mesh": mesh, "outputs": outputs}
        example = torch.randn(8, 8, 8, dtype=torch.float64)
        parallel = autotp.parallelize(model, None, (example,), inputs="uneven", **options)
        ways, rank = parallel.plan.batch_ways, parallel.batch_rank
        for sizes in ((4, 2), (3, 3), (1, 4), (5, 0), (2, 4), (1, 0), (0, 1)):
            sizes = [sizes[i % 2] for i in range(ways)]
            x = torch.randn(sum(sizes), 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
            own, whole = x.split(sizes)[rank].clone().requires_grad_(), x.clone().requires_grad_()
            mine, theirs = parallel(own), plain(whole)
            terms = []
            for name, value in theirs.items():
                per_row = value.shape[0] // len(x) if name in ("rows", "tokens", "firsts", "given", "ids") else 0
                expected = value.split([per_row * size for size in sizes])[rank] if per_row else value
                kept = isinstance(mine[name], DTensor)
                found, expected = (mine[name].full_tensor(), value) if kept else (mine[name], expected)
                torch.testing.assert_close(found, expected, **SIX, msg=f"{strategy} {outputs} {sizes} {name}")
                if name in ("rows", "tokens", "firsts"):  # what ranks compute from their rows is averaged
                    terms.append(found.sin().sum() * (1 if kept else ways))
                elif name == "loss":
                    terms.append(found)
            sum(terms).backward()
            (sum(theirs[name].sin().sum() for name in ("rows", "tokens", "firsts")) + theirs["loss"]).backward()
            expected = ways * whole.grad.split(sizes)[rank]  # which the layer that made it will average
            torch.testing.assert_close(own.grad, expected, **SIX, msg=f"{strategy} {outputs} {sizes} the input")
        assert sum(each.key.whole for each in parallel.programs) == 3, parallel.programs
        for (name, own), other in zip(parallel.named_parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(own.grad.full_tensor(), other.grad, **SIX, msg=f"{strategy} {outputs} {name}")
        with pytest.raises(autotp.PlanMismatchError, match="different calls: .*only the rows .dim 0. of different parts"):
            parallel(torch.randn(2, 8 + 8 * (dist.get_rank() == ranks - 1), 8, dtype=torch.float64))
    offset = torch.ones(4, dtype=torch.float64)
    example = (torch.zeros(dist.get_world_size(), 4, dtype=torch.float64), offset)
    parallel = autotp.parallelize(Offset().double(), None, example, strategy="zero3", inputs="uneven")
    for sizes in ((3, 2), (8, 4), (4, 0)):
        with pytest.raises(autotp.PlanMismatchError, match="argument offset has 4.* rows .dim 0. on the ranks"):
            parallel(torch.zeros(sizes[dist.get_rank() % 2], 4).double(), offset)


class Offset(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x, offset):
        return self.inner(x) * offset.sum()


class Compared(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x, others, offset, scale):
        return (self.inner(x) + offset) @ others.T * scale


def inputs_that_are_no_part_of_a_batch():
    """Every rank gives them whole, beside its own rows; they must be the same on all ranks."""
    torch.manual_seed(0)
    plain, ranks, rank = Compared().double(), dist.get_world_size(), dist.get_rank()
    x, scale = torch.randn(2 * ranks, 8, dtype=torch.float64), torch.tensor(2.0, dtype=torch.float64)
    others, offset = (torch.randn(rows, 8, dtype=torch.float64) for rows in (2 * ranks + 1, 1))
    whole = {"others": others, "offset": offset, "scale": scale}
    for inputs in ("local", "uneven"):
        parallel = autotp.parallelize(copy.deepcopy(plain), None, (x,), whole, strategy="data", inputs=inputs)
        for rows in (2, 1, 3, 2 * ranks + 1):
            x = torch.randn(rows * ranks, 8, dtype=torch.float64)
            plain.zero_grad()
            parallel.zero_grad()
            found, expected = parallel(x[rows * rank :][:rows], **whole), plain(x, **whole)
            torch.testing.assert_close(found, expected[rows * rank :][:rows], rtol=1e-9, atol=1e-12)
            found.square().mean().backward()
            expected.square().mean().backward()
            for name, parameter in plain.named_parameters():
                mine = parallel.get_parameter(name).grad.full_tensor()
                torch.testing.assert_close(mine, parameter.grad, rtol=1e-9, atol=1e-12)
        prepared = parallel.prepare((x[:5],), whole, mode="inference")
        parallel.eval()
        with torch.no_grad():
            assert parallel(x[:5], **whole).shape == (5, len(others))
        assert prepared is parallel.programs[-1]
        parallel.train()
        with pytest.raises(autotp.PlanMismatchError, match="argument others differs .* its dim 0 is not the batch"):
            parallel(x[:4], **whole | {"others": others + rank})
    twice = {**whole, "others": torch.randn(4 * ranks, 8, dtype=torch.float64)}
    parallel = autotp.parallelize(plain, None, (x[: 2 * ranks],), twice, strategy="data", inputs="local")
    with pytest.raises(
        autotp.PlanMismatchError, match="others of shape .* is the same on all ranks, but is taken for a part"
    ):
        parallel(x[:2] + rank, **twice)


def ranks_disagree():
    """On weights, inputs, modes and kinds of calls: every rank raises, and the module still works."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    x, y = data()[:8]
    torch.manual_seed(rank)
    model = Classifier().double()
    with pytest.raises(autotp.PlanMismatchError, match=r"first.weight has other values on rank 1 than on rank 0 \(4 of 4"):
        autotp.parallelize(model, None, (x, y), strategy="data", mesh=(ranks,), broadcast=False)
    parallel = autotp.parallelize(model, None, (x, y), strategy="zero3", mesh=(ranks,), debug=True)
    for name, values in {
        "inputs": ("global", "local"), "strategy": ("data", "zero3"), "schedule": ("overlap", "none"),
        "compile": (None, False), "outputs": ("whole", "dtensor"), "dropout": ("sharded", "as-single"),
        "max_programs": (2, 3), "debug": (False, True),
    }.items():  # fmt: skip
        given = {"strategy": "data", name: values[rank == ranks - 1]}
        told = f"{name} is {values[1]!r} on rank {ranks - 1}, and {values[0]!r} on rank 0"
        with pytest.raises(autotp.PlanMismatchError, match=told):
            autotp.parallelize(model, None, (x, y), mesh=(ranks,), **given)
    for asked, given in ((nn.Sequential(nn.Linear(8, 8 + rank)), x), (nn.Linear(8, 8), x[rank:])):
        with pytest.raises(autotp.PlanMismatchError, match="ranks have different models, or inputs of different shapes"):
            autotp.parallelize(asked.double(), None, (given,), strategy="zero3", mesh=(ranks,))
    plan = autotp.plan(model, autotp.Topology.flat(ranks), (x, y), strategy=("data", "zero3")[rank > 0])
    with pytest.raises(autotp.PlanMismatchError, match=f"plan is '.*' on rank 1, and '{plan.hash if rank == 0 else ''}"):
        autotp.parallelize(model, None, (x, y), plan=plan)
    alone = "rank 0 one for .*, under no_sync.*, rank 1 one for"
    with parallel.no_sync() if rank == 0 else nullcontext(), pytest.raises(autotp.PlanMismatchError, match=alone):
        parallel(x, y)
    other = autotp.parallelize(model, None, (x, y), strategy="zero3", mesh=(1, ranks))
    with pytest.raises(autotp.AutotpError, match="the state dict's first.weight lies on"):
        other.load_state_dict(parallel.state_dict())
    model.second.bias.requires_grad_(rank == 0)
    with pytest.raises(
        autotp.PlanMismatchError, match="requires_grad of second.bias is False on rank 1, and True on rank 0"
    ):
        autotp.parallelize(model, None, (x, y), strategy="zero3", mesh=(ranks,))
    model.second.bias.requires_grad_()
    gathered = [torch.empty(16, 8, dtype=torch.float64) for _ in range(ranks)]
    dist.all_gather(gathered, parallel.first.weight.full_tensor())
    assert all(torch.equal(each, gathered[0]) for each in gathered), "rank 0's weights are everybody's"
    assert rank == 0 or not torch.equal(gathered[0], model.first.weight)
    for _ in range(2):
        with pytest.raises(autotp.PlanMismatchError, match="argument labels differs between ranks 0 and 1"):
            parallel(x, (y + rank) % 4)
        with pytest.raises(autotp.PlanMismatchError, match="ranks made different calls: .*int64.8.*, rank 1 one for"):
            parallel(x, *([y] if rank == 0 else []))
        parallel.train(rank == 0)
        with pytest.raises(autotp.PlanMismatchError, match="rank 0 one for training .*rank 1 one for evaluation"):
            parallel(x, y)
        parallel.train()
        parallel(x, y).backward()
    usual = autotp.parallelize(model, None, (x, y), strategy="zero3", mesh=(ranks,))
    with pytest.raises(autotp.PlanMismatchError, match="argument x differs between ranks 0 and 1"):
        usual(x + rank, y)  # the first call is always checked
    usual(x, y)
    for inputs in ("local", "uneven"):
        whole = autotp.parallelize(model, None, (x, y), strategy="megatron-1d", mesh=(1, ranks), inputs=inputs)
        unsplit = r"this plan does not split the batch \(its batch_ways is 1\).*a strategy that splits the batch"
        with pytest.raises(autotp.PlanMismatchError, match=f"argument x differs .* 0 and 1, and {unsplit}"):
            whole(x + rank, y)
        with pytest.raises(autotp.PlanMismatchError, match=f"ranks made different calls: .*{unsplit}"):
            whole(x[rank:], y[rank:])
        whole(x, y)


def arguments_that_are_no_tensors():
    """Functions, objects and sets have different addresses and orders on every rank, but the call is the same."""

    class Held:
        scale = 2.0

    def triple(x):
        return 3 * x

    class Choosing(Classifier):
        def forward(self, x, act=torch.relu, then=triple, held=Held(), draws=torch.Generator(), names=frozenset("abcdef")):  # noqa: B008
            return then(act(super().forward(x))) * held.scale * len(names)

    torch.manual_seed(0)
    model, (x, _) = Choosing().double(), data()[:8]
    plain = copy.deepcopy(model)
    parallel = autotp.parallelize(model, None, (x,), strategy="zero3", mesh=(dist.get_world_size(),), debug=True)
    for rows in (8, 4):
        torch.testing.assert_close(parallel(x[:rows]), plain(x[:rows]), **SIX)


def losses_outside():
    """Outputs keep the plan's layout, and a loss of local logits gives the gradients of the loss of all logits."""
    torch.manual_seed(0)
    x, y = data()[:8]
    ranks = dist.get_world_size()
    for strategy, placement in (("data", Shard(0)), ("megatron-1d", Shard(1)), ("megatron-1d", None)):
        for schedule in ("overlap", "none"):
            model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, 8)).double()
            plain = copy.deepcopy(model)
            pins = {"output:0": "R"} if placement is None else {"output:0": f"S({placement.dim})@x"}
            asked = {"strategy": strategy, "mesh": (ranks,), "schedule": schedule, "constraints": pins}
            parallel = autotp.parallelize(model, None, (x,), outputs="dtensor", **asked)
            logits = parallel(x)
            assert isinstance(logits, DTensor) and logits.shape == (8, 8)
            assert logits.placements == (placement or Replicate(),), (strategy, logits.placements)
            if placement == Shard(1):
                with loss_parallel():
                    loss = nn.functional.cross_entropy(logits, y)
                    loss.backward()
            elif placement == Shard(0):
                part = slice(8 // ranks * dist.get_rank(), 8 // ranks * (dist.get_rank() + 1))
                loss = nn.functional.cross_entropy(logits.to_local(), y[part]) / ranks
                loss.backward()
            else:
                loss = nn.functional.cross_entropy(logits.full_tensor(), y)
                loss.backward()
            nn.functional.cross_entropy(plain(x), y).backward()
            for (name, mine), theirs in zip(parallel.named_parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(mine.grad.full_tensor(), theirs.grad, **SIX, msg=f"{strategy} {schedule} {name}")
            with torch.no_grad():
                torch.testing.assert_close(parallel(x[:3]).full_tensor(), plain(x[:3]), **SIX)
            again = autotp.parallelize(model, None, (x,), plan=autotp.Plan.from_json(parallel.plan.to_json()))
            assert isinstance(again(x), DTensor)
            with pytest.raises(autotp.AutotpError, match="outputs='whole', but the plan is for outputs='dtensor'"):
                autotp.parallelize(model, None, (x,), plan=parallel.plan, outputs="whole")


def inputs_that_are_distributed():
    """``DTensor`` inputs, on the module's mesh or another, are equivalent to plain ones, and so are their gradients."""
    torch.manual_seed(0)
    x, _ = data()[:8]
    ranks = dist.get_world_size()
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)).double()
    plain = model(x)
    for inputs in ("global", "local"):
        example = distribute_tensor(x, init_device_mesh("cpu", (ranks,)), [Shard(0)])
        parallel = autotp.parallelize(model, None, (example,), strategy="data", mesh=(ranks,), inputs=inputs)
        parallel.prepare((example,))
        mine = parallel.get_parameter("0.weight").device_mesh
        for mesh in (mine, init_device_mesh("cpu", (1, ranks))):
            rest = [Replicate()] * (mesh.ndim - 1)
            for placement in (Shard(0), Shard(1), Replicate()):
                given = distribute_tensor(x, mesh, [*rest, placement]).requires_grad_()
                out = parallel(given)
                rows = (
                    slice(None)
                    if inputs == "global"
                    else slice(8 // ranks * dist.get_rank(), 8 // ranks * (dist.get_rank() + 1))
                )
                torch.testing.assert_close(out, plain[rows], **SIX)
                if inputs == "global" and mesh is mine:
                    out.square().sum().backward()
                    own = x.clone().requires_grad_()
                    model(own).square().sum().backward()
                    torch.testing.assert_close(given.grad.full_tensor(), own.grad, **SIX)
        assert len(parallel.programs) == 1


class Remembering(nn.Module):
    def __init__(self):
        super().__init__()
        self.into, self.out = nn.Linear(8, 16), nn.Linear(16, 8)
        self.register_buffer("seen", torch.zeros(4, 6, 16), persistent=False)

    def forward(self, x, at):
        self.seen.index_copy_(1, at, self.into(x))
        return self.out(self.seen.sum(1))


def a_cache_in_parts():
    """Each rank keeps its shard of a buffer that every call writes and that is not in the state dict."""
    torch.manual_seed(0)
    ranks, model = dist.get_world_size(), Remembering().double()
    plain, args = copy.deepcopy(model), (torch.randn(4, 3, 8).double(), torch.arange(3))
    for schedule in ("overlap", "none"):
        asked = {"strategy": "data", "mesh": (ranks,), "mode": "inference", "schedule": schedule}
        parallel = autotp.parallelize(model, None, args, **asked)
        assert parallel.seen.placements == (Shard(0),) and parallel.seen.to_local().shape == (4 // ranks, 6, 16)
        theirs, mine = copy.deepcopy(plain), copy.deepcopy(parallel)
        with torch.no_grad():
            for start, count in ((0, 3), (3, 1), (4, 1)):
                given = args[0][:, :count], torch.arange(start, start + count)
                torch.testing.assert_close(mine(*given), theirs(*given), **SIX)
        torch.testing.assert_close(mine.seen.full_tensor(), theirs.seen, **SIX)
        with pytest.raises(autotp.AutotpError, match="seen: graphs were made for torch.float64"):
            parallel.seen = torch.zeros(4, 6, 16)
        with pytest.raises(autotp.AutotpError, match="seen: the graph cannot follow a cache"):
            del parallel.seen
        assert not parallel.seen.to_local().any() and set(parallel.state_dict()) == set(model.state_dict())


class Shared(nn.Module):
    def __init__(self):
        super().__init__()
        self.query = nn.Linear(8, 8)
        self.key = self.query

    def forward(self, x):
        return self.key(torch.tanh(self.query(x)))


def as_with_other_modules():
    """Names of a shared module, anomaly detection; contradictions to a plan and unsupported uses are errors."""
    torch.manual_seed(0)
    x, ranks, model = torch.randn(4, 8).double(), dist.get_world_size(), Shared().double()
    parallel = autotp.parallelize(model, None, (x,), strategy="zero3", mesh=(ranks,))
    assert list(parallel.state_dict()) == list(model.state_dict()) and parallel.key is parallel.query
    with torch.autograd.set_detect_anomaly(True):
        parallel(x).square().sum().backward()
    model(x).square().sum().backward()
    torch.testing.assert_close(parallel.key.weight.grad.full_tensor(), model.key.weight.grad, **SIX)
    plan = parallel.plan
    for wrong in ({"strategy": "data"}, {"mesh": (1, ranks)}, {"memory": 1e9}, {"constraints": ["query.weight=R@x"]}):
        with pytest.raises(autotp.AutotpError, match=f"{next(iter(wrong))}=.*but the plan is for"):
            autotp.parallelize(model, None, (x,), plan=plan, **wrong)
    with pytest.raises(autotp.PlanMismatchError, match="but the plan is for .* leave topology out, or plan for it"):
        autotp.parallelize(model, autotp.Topology.load("ethernet-10g").resized(ranks), (x,), plan=plan)
    autotp.parallelize(model, plan.topology, (x,), plan=plan, strategy="zero3", mesh=[ranks])
    for again in (autotp.plan, autotp.parallelize):
        with pytest.raises(autotp.AutotpError, match=r"distributed already, as its query\.weight is a DTensor"):
            again(parallel, autotp.Topology.local(), (x,))
        with pytest.raises(autotp.AutotpError, match="wrapped by DistributedDataParallel, which distributes it"):
            again(nn.parallel.DistributedDataParallel(Shared().double()), autotp.Topology.local(), (x,))
        with pytest.raises(autotp.AutotpError, match="wrapped by torch.compile: give the model"):
            again(torch.compile(model), autotp.Topology.local(), (x,))
    with TestCase().assertLogs("autotp") as said:
        autotp.parallelize(nn.Sequential(model), None, (x,), strategy="zero3", mesh=(ranks,))
    assert any("0.query.weight is a parameter of another model, too" in line for line in said.output), said.output
    fresh = copy.deepcopy(model)
    with torch.inference_mode():
        within = autotp.parallelize(fresh, None, (x,), strategy="zero3", mesh=(ranks,))
        torch.testing.assert_close(within(x[: len(x) // 2]), model(x[: len(x) // 2]), **SIX)
        made = nn.Linear(8, 8)
        with pytest.raises(autotp.AutotpError, match=r"weight was made under torch.inference_mode\(\)"):
            autotp.parallelize(made, None, (torch.ones(4, 8),))
    within(x).sum().backward()
    inside = nn.Sequential(parallel)
    for whole in (parallel, inside):
        for trace in (torch.export.export, torch.jit.trace, lambda module, _: torch.fx.symbolic_trace(module)):
            with pytest.raises(autotp.AutotpError, match="a distributed module cannot be exported or traced"):
                trace(whole, (x,))
    with pytest.raises(autotp.AutotpError, match="a distributed module cannot be exported or traced"):
        torch.jit.script(parallel)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="a distributed module cannot be exported or traced"):
        torch.export.export(parallel, (x,), strict=True)


def main():
    parts_of_the_batch()
    rows_of_the_batch()
    through_several_modules()
    parts_of_other_sizes()
    inputs_that_are_no_part_of_a_batch()
    ranks_disagree()
    arguments_that_are_no_tensors()
    losses_outside()
    inputs_that_are_distributed()
    a_cache_in_parts()
    as_with_other_modules()
