"""An index out of range raises on every rank, even if only one rank is given it."""

import torch
import torch.distributed as dist
from lookups import SHARDED, Language, changed

import autotp

torch.manual_seed(0)
model = Language().double()
ids, labels = torch.randint(32, (4, 8)), torch.randint(32, (4, 8))
constraints = [*SHARDED, "embedding=m2@x"]
for inputs in ("global", "local"):
    parallel = autotp.parallelize(
        model, autotp.Topology.flat(4), (ids, labels), mesh=(2, 2), constraints=constraints, inputs=inputs
    )
    rank = dist.get_rank()
    mine = (ids, labels) if inputs == "global" else (ids.chunk(2)[rank // 2], labels.chunk(2)[rank // 2])
    parallel(*mine).backward()
    wrong = changed(mine[0], 32) if inputs == "global" or rank // 2 == 1 else mine[0]
    try:
        parallel(wrong, mine[1])
    except IndexError:
        print(f"raised on rank {rank}\n", end="", flush=True)  # in one write, as ranks share the output
    dist.barrier()
dist.destroy_process_group()
