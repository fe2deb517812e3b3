"""State saved by four processes with ``torch.distributed.checkpoint``, loaded by four, two and one: no number differs."""

import copy
import sys
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import transformers
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import Replicate, Shard
from torch.utils._pytree import tree_flatten_with_path

import autotp

FULL = StateDictOptions(full_state_dict=True)
ON_RANK_0 = StateDictOptions(full_state_dict=True, cpu_offload=True)
FROM_RANK_0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)

torch.manual_seed(0)
#: Tied embeddings, fused query-key-value weights, and a vocabulary that no axis divides.
MODEL = transformers.GPT2LMHeadModel(
    transformers.GPT2Config(
        vocab_size=99, n_embd=16, n_head=4, n_layer=1, n_positions=16, use_cache=False, bos_token_id=0, eos_token_id=0,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )
).double()  # fmt: skip
IDS = torch.randint(99, (4, 8))
BATCH = {"input_ids": IDS, "labels": IDS}


def adamw(module, how):  # the keys' bias has no gradient: eps prevents steps by rounding errors
    return torch.optim.AdamW(module.parameters(), lr=1e-2, eps=1e-3, **{how: True})


def made(strategy, mesh, how, draw=1):
    """A module with other weights, and an optimizer after two steps."""
    torch.manual_seed(draw)
    model, machine = copy.deepcopy(MODEL), autotp.Topology.flat(dist.get_world_size())
    model.apply(model._init_weights)
    parallel = autotp.parallelize(model, machine, (), BATCH, strategy=strategy, mesh=mesh)
    optimizer = adamw(parallel, how)
    steps(parallel, optimizer, 2)
    return parallel, optimizer


def steps(module, optimizer, count=3):
    losses = []
    for _ in range(count):
        loss = module(**BATCH).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def whole(state):
    return {path: v.full_tensor() if hasattr(v, "full_tensor") else v for path, v in tree_flatten_with_path(state)[0]}


def require_equal(found, wanted):
    """Checks equality bit for bit, for any layout."""
    found, wanted = whole(found), whole(wanted)
    assert found.keys() == wanted.keys()
    for path, value in wanted.items():
        assert torch.equal(found[path], value) if isinstance(value, torch.Tensor) else found[path] == value, path


def require_continued(module, optimizer, losses):
    for parameter, state in optimizer.state.items():
        assert all(value.placements == parameter.placements for value in state.values() if value.dim())
    for found, wanted in zip(steps(module, optimizer), losses, strict=True):
        assert abs(found - wanted) < 1e-9 * wanted, (found, wanted)


def in_blocks(module):
    return any(type(p) not in (Shard, Replicate) for value in module.parameters() for p in value.placements)


def require_resumed(folder, strategy, mesh, how, losses):
    """Resumes a module and an optimizer in another state, in each way that torch has."""
    parallel, optimizer = made(strategy, mesh, how)

    def agree():
        require_equal(get_state_dict(parallel, optimizer), whole_of(folder))
        require_continued(parallel, optimizer, losses)

    state = {"model": parallel.state_dict(), "optimizer": get_optimizer_state_dict(parallel, optimizer)}
    dcp.load(state, checkpoint_id=f"{folder}/now")
    set_state_dict(parallel, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    agree()
    # The state under the optimizer's own names, loaded in place.
    state = {"model": parallel.state_dict(), "optimizer": optimizer.state_dict()}
    dcp.load(state, checkpoint_id=f"{folder}/later")
    optimizer.load_state_dict(state["optimizer"])
    agree()
    weights, moments = whole_of(folder)  # torch copies this rank's parts from these
    set_model_state_dict(parallel, weights, options=FULL)
    set_optimizer_state_dict(parallel, optimizer, moments, options=FULL)
    agree()
    weights, moments = ({}, {}) if dist.get_rank() else whole_of(folder)
    set_model_state_dict(parallel, weights, options=FROM_RANK_0)
    set_optimizer_state_dict(parallel, optimizer, moments, options=FROM_RANK_0)
    agree()
    return parallel


def whole_of(folder):
    state = torch.load(f"{folder}/whole.pt")
    return state["model"], state["optimizer"]


def regrouped(folder, ranks):
    """Splits off the first ranks as a job of their own; returns whether this process is one of them."""
    rank = dist.get_rank()
    dist.barrier()
    dist.destroy_process_group()
    if rank < ranks:
        store = dist.FileStore(f"{folder}/store{ranks}", ranks)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=120))
    return rank < ranks


def main(how):
    dist.init_process_group("gloo")
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    folder = folder[0]
    first, optimizer = made("megatron-sp", (2, 2), how, draw=2)
    assert in_blocks(first)
    dcp.save(
        {"model": first.state_dict(), "optimizer": get_optimizer_state_dict(first, optimizer)},
        checkpoint_id=f"{folder}/now",
    )
    later = dcp.async_save(
        {"model": get_model_state_dict(first), "optimizer": optimizer.state_dict()},
        checkpoint_id=f"{folder}/later",
        process_group=dist.new_group(backend="gloo"),
    )
    weights, moments = get_state_dict(first, optimizer, options=ON_RANK_0)
    if dist.get_rank() == 0:
        torch.save({"model": weights, "optimizer": moments}, f"{folder}/whole.pt")
    losses = steps(first, optimizer)  # must not change what is being saved
    later.result()
    dist.barrier()

    assert not in_blocks(require_resumed(folder, "zero3", (4,), how, losses))
    if not regrouped(folder, 2):
        return
    assert in_blocks(require_resumed(folder, "megatron-1d", (2,), how, losses))
    if not regrouped(folder, 1):
        return
    dist.destroy_process_group()
    plain = copy.deepcopy(MODEL)
    optimizer = adamw(plain, how)
    state = {"model": plain.state_dict(), "optimizer": get_optimizer_state_dict(plain, optimizer)}
    dcp.load(state, checkpoint_id=f"{folder}/now", no_dist=True)
    set_state_dict(plain, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    require_equal(get_state_dict(plain, optimizer), whole_of(folder))
    for found, loss in zip(steps(plain, optimizer), losses, strict=True):
        assert abs(found - loss) < 1e-9 * loss, (found, loss)
    print("passed")


if __name__ == "__main__":
    main(sys.argv[1])
    if dist.is_initialized():
        dist.destroy_process_group()
