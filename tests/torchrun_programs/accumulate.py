"""Gradient accumulation in a real job: three steps of three micro-batches, of which only the last reduces."""

import contextlib
import copy

import torch
import torch.distributed as dist
from torch import nn

import autotp


class Small(nn.Module):
    """Token embeddings, a norm and a perceptron, with a tied head. 7 rows are not divisible by 2."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 6)
        self.norm = nn.LayerNorm(6)
        self.up, self.down = nn.Linear(6, 10), nn.Linear(10, 6)

    def forward(self, ids):
        x = self.embed(ids)
        x = x + self.down(torch.tanh(self.up(self.norm(x))))
        return (x @ self.embed.weight.t()).logsumexp(-1).mean()


def main():
    ranks = dist.get_world_size()
    torch.manual_seed(0)
    plain = Small().double()
    batches = [torch.randint(7, (4, 5), generator=torch.Generator().manual_seed(k)) for k in range(3)]
    for strategy in ("data", "zero3", "megatron-1d"):
        for schedule in ("overlap", "none"):
            one = copy.deepcopy(plain)
            topology = autotp.Topology.flat(ranks)
            many = autotp.parallelize(
                copy.deepcopy(plain), topology, (batches[0],), strategy=strategy, mesh=(ranks,), schedule=schedule
            )
            optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2, eps=1e-3) for m in (one, many)]
            for _ in range(3):
                for module in (one, many):
                    for k, ids in enumerate(batches):
                        with many.no_sync() if k < 2 else contextlib.nullcontext():
                            module(ids).backward()
                            assert module is one or k == 2 or all(p.grad is None for p in module.parameters())
                    nn.utils.clip_grad_norm_(module.parameters(), 0.5)
                for name, want in one.named_parameters():
                    got = many.get_parameter(name).grad
                    assert got is not None, (strategy, schedule, name)
                    torch.testing.assert_close(got.full_tensor(), want.grad, rtol=1e-9, atol=1e-12, msg=name)
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
            other = copy.deepcopy(many)
            with many.no_sync():
                many(batches[0]).backward()
            want = one(batches[1])
            torch.testing.assert_close(other(batches[1]), want, rtol=1e-9, atol=1e-12)
