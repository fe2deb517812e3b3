"""State in blocks and ``torch.distributed.checkpoint``, in one process; tests/torchrun_programs has further tests."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

import autotp
from autotp.runtime.state import checksum, distribute
from passes.layouts.layout import place

WHOLE = torch.arange(48.0).view(12, 4)


@pytest.fixture(scope="module", autouse=True)
def mesh(one_rank):
    return init_device_mesh("cpu", (1,))


def test_a_block_is_a_chunk(mesh, tmp_path):
    tensor = distribute(WHOLE, (place(0, 3),), mesh)
    dcp.save({"fused": tensor}, checkpoint_id=tmp_path)
    stored = dcp.FileSystemReader(tmp_path).read_metadata().state_dict_metadata["fused"]
    assert [tuple(chunk.offsets) for chunk in stored.chunks] == [(0, 0), (4, 0), (8, 0)]
    assert {tuple(chunk.sizes) for chunk in stored.chunks} == {(4, 4)}
    for layout in (place(0, 3), place(1, 2), Shard(1), Replicate()):
        found = distribute(torch.zeros(12, 4), (layout,), mesh)
        dcp.load({"fused": found}, checkpoint_id=tmp_path)
        assert torch.equal(found.full_tensor(), WHOLE), layout
    assert torch.equal(tensor.__get_tensor_shard__(MetadataIndex("fused", (4, 0))), WHOLE[4:8])
    with pytest.raises(ValueError, match=r"no chunk of fused at torch\.Size\(\[2, 0\]\)"):
        tensor.__get_tensor_shard__(MetadataIndex("fused", (2, 0)))


def test_other_tensors_are_one_chunk(mesh):
    for layout in (Shard(0), Replicate()):
        (chunk,) = distribute(WHOLE, (layout,), mesh).__create_chunk_list__()
        assert (tuple(chunk.offsets), tuple(chunk.sizes)) == ((0, 0), (12, 4))


def test_state_of_another_plan_is_brought_into_the_layouts_of_parameters(mesh):
    parameter = torch.nn.Parameter(distribute(WHOLE, (place(0, 3),), mesh))
    optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
    optimizer.state[parameter] = {"momentum_buffer": distribute(WHOLE, (Replicate(),), mesh), "step": 3}
    autotp.redistribute(optimizer)
    moved = optimizer.state[parameter]["momentum_buffer"]
    assert moved.placements == parameter.placements and torch.equal(moved.full_tensor(), WHOLE)
    state = optimizer.state_dict()
    assert autotp.storable(state) is state


@pytest.mark.parametrize("dtype", [torch.int64, torch.float64, torch.bfloat16, torch.complex64])
def test_a_checksum_depends_on_values_alone(dtype):
    """For torch, the column of labels of a batch of one is contiguous, although it has the row's stride."""
    column = torch.arange(6).reshape(1, 6).to(dtype)[:, 2]
    assert checksum(column) == checksum(torch.full((1,), 2, dtype=dtype)) != checksum(torch.full((1,), 3, dtype=dtype))
    square = torch.arange(12).reshape(3, 4).to(dtype)
    assert checksum(square.t()) == checksum(square.t().contiguous()) != checksum(square)
    assert checksum(square[:0]) == checksum(square[:, :0])
