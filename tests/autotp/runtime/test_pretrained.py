"""Hugging Face directories in a process group of one: what is read and written, and what is refused."""

import itertools
import json
import os
import stat
import sys

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from thinned import SCHEDULES
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.tensor import Replicate
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset

import autotp
from autotp.runtime.checkpoint import save
from autotp.runtime.checkpoint.parts import parts_of
from costmodel.text.files import move_atomically
from passes.layouts.codes import fits, restorable
from passes.layouts.layout import place, take

pytestmark = pytest.mark.usefixtures("one_rank")


class Net(nn.Module):
    """A tied weight, a parameter of 0 dims, and buffers, one of which is not persistent."""

    def __init__(self):
        super().__init__()
        self.body = nn.ModuleDict({"first": nn.Linear(4, 6), "norm": nn.BatchNorm1d(6)})
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.body["first"].weight
        self.scale = nn.Parameter(torch.randn(()))
        self.register_buffer("offset", torch.randn(6), persistent=False)

    def forward(self, x):
        hidden = self.body["norm"](self.body["first"](x))
        return hidden * self.scale + self.head(x) + self.offset


X = torch.linspace(-1, 1, 12).reshape(3, 4)


@pytest.fixture
def parallel():
    torch.manual_seed(0)
    return autotp.parallelize(Net(), None, (X,), strategy="data")


def state(seed=1, model=Net):
    """The state of another such model, without the second name of its tied weight."""
    torch.manual_seed(seed)
    made = model()
    if isinstance(made, Net):
        made(X)  # updates the running statistics
    return {name: value.detach().clone() for name, value in made.state_dict().items() if name != "head.weight"}


def values(parallel):
    found = {**dict(parallel.named_parameters()), **dict(parallel.named_buffers())}
    return {n: (v.full_tensor() if hasattr(v, "full_tensor") else v).detach().clone() for n, v in found.items()}


def require_same(found, wanted):
    for name, value in wanted.items():
        assert torch.equal(found[name], value), name


def split(folder, tensors, **changes):
    """Saves tensors in two files with an index, some of whose entries are replaced by ``changes``."""
    names = list(tensors)
    files = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, held in files.items():
        save_file({name: tensors[name] for name in held}, folder / file)
    index = {name: file for file, held in files.items() for name in held} | changes
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))


@pytest.mark.parametrize("renamed", [{}, {"body.first.weight": "head.weight"}], ids=["first name", "other name"])
def test_parameters_and_persistent_buffers_are_read_in_place(parallel, renamed, tmp_path):
    wanted, before, own = state(), values(parallel), list(parallel.parameters())
    split(tmp_path, {renamed.get(name, name): value for name, value in wanted.items()})
    assert autotp.load_pretrained(parallel, tmp_path) == ((), ())
    found = values(parallel)
    require_same(found, wanted | {"offset": before["offset"]})
    assert int(found["body.norm.num_batches_tracked"]) == 1
    assert all(one is other for one, other in zip(parallel.parameters(), own, strict=True))
    assert parallel.get_parameter("head.weight") is parallel.get_parameter("body.first.weight")


def test_values_are_cast_and_one_file_comes_before_several(parallel, tmp_path):
    wanted = {n: v.bfloat16() if v.is_floating_point() else v.int() for n, v in state().items()}
    split(tmp_path, state(seed=2))
    save_file(wanted, tmp_path / "model.safetensors")
    autotp.load_pretrained(parallel, str(tmp_path))
    require_same(values(parallel), {n: v.float() if v.is_floating_point() else v.long() for n, v in wanted.items()})
    assert parallel.get_parameter("scale").dtype == torch.float32


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_step_between_whose_passes_values_are_read_is_refused(schedule, tmp_path):
    """Even though the backward pass does not read any of the loaded values."""
    model = nn.Linear(4, 6)
    parallel = autotp.parallelize(model, None, (X,), strategy="data", schedule=schedule)
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    loss = parallel(X).sum()
    autotp.load_pretrained(parallel, tmp_path)
    with pytest.raises(autotp.AutotpError, match="changed in place between the forward pass and its backward pass"):
        loss.backward()
    parallel(X).sum().backward()


def test_with_strict_false_what_both_have_is_read(parallel, tmp_path):
    wanted, before = state(), values(parallel)
    save_file(
        {n: v for n, v in wanted.items() if n != "scale"} | {"more.bias": torch.ones(2)}, tmp_path / "model.safetensors"
    )
    assert autotp.load_pretrained(parallel, tmp_path, strict=False) == (("scale",), ("more.bias",))
    require_same(values(parallel), wanted | {"scale": before["scale"]})


@pytest.mark.parametrize("prefix", ["model.", "body."])
def test_a_prefix_that_all_names_have_or_lack(parallel, prefix, tmp_path):
    """First, the file's names have an extra prefix; second, they lack the module's, except outside the base model."""
    wanted = state()
    names = {n: prefix + n for n in wanted} if prefix == "model." else {n: n.removeprefix(prefix) for n in wanted}
    save_file({names[n]: value for n, value in wanted.items()}, tmp_path / "model.safetensors")
    autotp.load_pretrained(parallel, tmp_path)
    require_same(values(parallel), wanted)


def test_a_prefix_that_could_be_either_is_refused(tmp_path):
    towers = nn.ModuleDict({"left": nn.Linear(4, 4), "right": nn.Linear(4, 4)})

    class Towers(nn.Module):
        def __init__(self):
            super().__init__()
            self.left, self.right = towers["left"], towers["right"]

        def forward(self, x):
            return self.left(x) * self.right(x)

    parallel = autotp.parallelize(Towers(), None, (X,), strategy="data")
    save_file(nn.Linear(4, 4).state_dict(), tmp_path / "model.safetensors")
    with pytest.raises(autotp.AutotpError, match=r"fit the model's equally well by left\., right\. before them"):
        autotp.load_pretrained(parallel, tmp_path, strict=False)


def two_values(tensors):
    tensors["head.weight"] = tensors["body.first.weight"] + 1


def lacking(tensors):
    for name in ("scale", "body.norm.weight"):
        del tensors[name]


def more(tensors):
    tensors |= {f"extra.{i}": torch.ones(1) for i in range(6)}


def reshaped(tensors):
    tensors["body.first.weight"] = tensors["body.first.weight"].T.contiguous()


def quantised(tensors):
    tensors["body.first.weight"] = tensors["body.first.weight"].to(torch.int8)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lacking, r"the files lack scale, body\.norm\.weight\. Give the directory of this model, or strict=False"),
        (more, r"the model has no extra\.0, extra\.1, extra\.2, extra\.3 and 2 more\. Give"),
        (
            reshaped,
            r"body\.first\.weight has shape \(6, 4\), and body\.first\.weight in model\.safetensors has \(4, 6\)\. Make",
        ),
        (quantised, r"body\.first\.weight is torch\.float32, and body\.first\.weight in model\.safetensors is I8\. Make"),
        (two_values, r"differ, and are one parameter of the model \(body\.first\.weight = head\.weight\)"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(parallel, change, message, tmp_path):
    tensors, before = state(), values(parallel)
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(autotp.AutotpError, match=message):
        autotp.load_pretrained(parallel, tmp_path)
    require_same(values(parallel), before)


def removed(folder):
    (folder / "model-00002-of-00002.safetensors").unlink()


def cut(folder):
    file = folder / "model-00002-of-00002.safetensors"
    file.write_bytes(file.read_bytes()[:-3])


def elsewhere(folder):
    split(folder, state(), scale="model-00002-of-00002.safetensors")


def no_index(folder):
    (folder / "model.safetensors.index.json").write_text('{"weight_map": ')


def no_map(folder):
    (folder / "model.safetensors.index.json").write_text("[]")


def pipe(folder):
    (folder / "model.safetensors.index.json").unlink()
    os.mkfifo(folder / "model.safetensors.index.json")


def emptied(folder):
    for file in folder.iterdir():
        file.unlink()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            removed,
            r"lacks model-00002-of-00002\.safetensors, which model\.safetensors\.index\.json names: copy or download",
        ),
        (
            cut,
            r"model-00002-of-00002\.safetensors is not a whole safetensors file \(.*not fully covered\): copy or download",
        ),
        (elsewhere, r"model-00002-of-00002\.safetensors lacks scale, which .* says it has: copy or download both"),
        (no_index, r"model\.safetensors\.index\.json is damaged \(JSONDecodeError.*: copy or download"),
        (no_map, r"model\.safetensors\.index\.json is damaged \(TypeError.*: copy or download"),
        (pipe, r"has neither model\.safetensors nor model\.safetensors\.index\.json: write"),
        (emptied, r"has neither model\.safetensors nor model\.safetensors\.index\.json: write one with save_pretrained"),
    ],
)
def test_files_that_are_missing_or_damaged_are_refused(parallel, change, message, tmp_path):
    before = values(parallel)
    split(tmp_path, state())
    change(tmp_path)
    with pytest.raises(autotp.AutotpError, match=message):
        autotp.load_pretrained(parallel, tmp_path)
    require_same(values(parallel), before)


@pytest.mark.parametrize("from_rank_0", [False, True])
def test_torch_loads_a_whole_state(parallel, from_rank_0):
    """Includes a parameter of 0 dims, which torch keeps a plain tensor."""
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=from_rank_0)
    given = state()
    set_model_state_dict(parallel, given | {"head.weight": given["body.first.weight"]}, options=options)
    require_same(values(parallel), given)


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("path", ["", "body", "body.first"])
def test_whole_tensors_are_not_loaded_into_parts(parallel, path, assign):
    before, prefix = values(parallel), path and f"{path}."
    given = {name.removeprefix(prefix): value for name, value in state().items() if name.startswith(prefix)}
    with pytest.raises(
        autotp.AutotpError, match=r"plain tensor for .*, a DTensor here: whole ones are loaded by .*full_state"
    ):
        parallel.get_submodule(path).load_state_dict(given, assign=assign)
    require_same(values(parallel), before)


def test_preparing_and_sampling_with_arguments_of_another_kind(parallel):
    for wrong in ({"args": torch.ones(2, 4)}, {"kwargs": 3}, {"mode": []}):
        with pytest.raises(autotp.AutotpError, match=next(iter(wrong))):
            parallel.prepare(**{"args": (torch.ones(2, 4),)} | wrong)
    with pytest.raises(autotp.AutotpError, match="the dataset is a int, 5: give one with a length"):
        parallel.sampler(5)


def test_other_arguments_are_refused(parallel, tmp_path, monkeypatch):
    with pytest.raises(autotp.AutotpError, match="there is no directory .*nowhere: give a local one"):
        autotp.load_pretrained(parallel, tmp_path / "nowhere")
    for call in (autotp.load_pretrained, autotp.save_pretrained):
        with pytest.raises(autotp.AutotpError, match="Net is not a distributed module"):
            call(Net(), tmp_path)
        for path in (None, ""):
            with pytest.raises(autotp.AutotpError, match=f"{path!r} is no path: give the name of a directory"):
                call(parallel, path)
    with pytest.raises(autotp.AutotpError, match="strict is a str, 'no': give True or False"):
        autotp.load_pretrained(parallel, tmp_path, strict="no")
    for size, said in (("2 GBs", "'2 GBs'"), (0, "max_shard_size is 0.0; it must be finite and positive")):
        with pytest.raises(autotp.AutotpError, match=said):
            autotp.save_pretrained(parallel, tmp_path, max_shard_size=size)
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    (tmp_path / "model.safetensors").touch()
    for call in (autotp.load_pretrained, autotp.save_pretrained):
        with pytest.raises(autotp.AutotpError, match="needs safetensors: pip install safetensors"):
            call(parallel, tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["model.safetensors"]


def test_a_plain_models_state_is_none_of_a_distributed_optimizer(parallel):
    plain = Net()
    theirs, ours = (torch.optim.AdamW(model.parameters()) for model in (plain, parallel))
    plain(X).sum().backward()
    theirs.step()
    ours.load_state_dict(theirs.state_dict())
    with pytest.raises(autotp.AutotpError, match=r"the optimizer's exp_avg of a parameter of \(.*full_state_dict=True"):
        autotp.redistribute(ours)


def test_what_is_written_is_read_again(parallel, tmp_path):
    """Tied weights are written once, by their first name; files of an earlier, longer index are removed, others stay."""
    folder, before = tmp_path / "new" / "one", values(parallel)
    for size, written in (("0.06KB", True), ("60 b", True), ("10gb", False), (60, True)):
        autotp.save_pretrained(parallel, folder, max_shard_size=size)
        assert (folder / "model.safetensors.index.json").exists() == written
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    owners = index["weight_map"]
    assert set(owners) == set(state())
    assert index["metadata"]["total_size"] == sum(v.nbytes for v in state().values())
    count = len(set(owners.values()))
    assert count > 2 and set(owners.values()) == {f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)}
    for file in folder.glob("*.safetensors"):
        held = load_file(file)
        assert len(held) == 1 or sum(v.nbytes for v in held.values()) <= 60
        assert set(held) == {name for name, owner in owners.items() if owner == file.name}
        with safe_open(file, "pt") as opened:
            assert opened.metadata() == {"format": "pt"}
        assert stat.S_IMODE(file.stat().st_mode) == stat.S_IMODE((folder / "model.safetensors.index.json").stat().st_mode)

    (folder / "notes.safetensors").touch()
    (folder / "model.safetensors").symlink_to(tmp_path / "linked")
    autotp.save_pretrained(parallel, folder)
    assert (folder / "model.safetensors").is_symlink() and (tmp_path / "linked").is_file()
    assert {file.name for file in folder.iterdir()} == {"model.safetensors", "notes.safetensors"}
    torch.manual_seed(5)
    other = autotp.parallelize(Net(), None, (X,), strategy="data")
    autotp.load_pretrained(other, folder)
    require_same(values(other), {name: value for name, value in before.items() if name != "offset"})


def test_a_save_that_is_killed_while_it_replaces_files_leaves_none_that_load(parallel, tmp_path, monkeypatch):
    autotp.save_pretrained(parallel, tmp_path, max_shard_size=60)
    names = {file.name for file in tmp_path.iterdir()}

    def killed(file, place):
        move_atomically(file, place)
        raise SystemExit

    with monkeypatch.context() as patched, pytest.raises(SystemExit):
        patched.setattr(save, "move_atomically", killed)
        patched.setattr(save.shutil, "rmtree", lambda *args, **kwargs: None)
        autotp.save_pretrained(parallel, tmp_path, max_shard_size=60)
    assert any(file.name.startswith(".autotp-") for file in tmp_path.iterdir())
    with pytest.raises(autotp.AutotpError, match="has neither"):
        autotp.load_pretrained(parallel, tmp_path)
    autotp.save_pretrained(parallel, tmp_path, max_shard_size=60)
    assert {file.name for file in tmp_path.iterdir()} == names


def test_an_old_single_file_is_not_loaded_in_the_place_of_new_ones(parallel, tmp_path, monkeypatch):
    autotp.save_pretrained(parallel, tmp_path)

    def killed(file, place):
        if place.name == save.INDEX:
            raise SystemExit
        move_atomically(file, place)

    with monkeypatch.context() as patched, pytest.raises(SystemExit):
        patched.setattr(save, "move_atomically", killed)
        autotp.save_pretrained(parallel, tmp_path, max_shard_size=60)
    with pytest.raises(autotp.AutotpError, match="has neither"):
        autotp.load_pretrained(parallel, tmp_path)


@pytest.mark.parametrize("sizes", [(60, 61), (60, 5e9), (5e9, 60), (5e9, 5e9)])
def test_old_files_are_restored_if_a_move_fails(parallel, tmp_path, monkeypatch, sizes):
    old, new = sizes
    autotp.save_pretrained(parallel, tmp_path, max_shard_size=old)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    with torch.no_grad():
        for parameter in parallel.parameters():
            parameter.zero_()

    def fails(file, place):
        if place.name in (save.INDEX, save.WHOLE):  # the last one
            raise OSError("the server does not answer")
        move_atomically(file, place)

    with monkeypatch.context() as patched, pytest.raises(autotp.AutotpError, match="the server does not answer"):
        patched.setattr(save, "move_atomically", fails)
        autotp.save_pretrained(parallel, tmp_path, max_shard_size=new, config=transformers.LlamaConfig())
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


def test_nothing_is_replaced_where_one_file_cannot_be(parallel, tmp_path):
    autotp.save_pretrained(parallel, tmp_path, max_shard_size=60)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    last = tmp_path / "model.safetensors.index.json"
    last.unlink()
    last.mkdir()
    with pytest.raises(autotp.AutotpError, match="it is a directory"):
        autotp.save_pretrained(parallel, tmp_path, max_shard_size=61, config=transformers.LlamaConfig())
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir() if file != last} == {
        name: data for name, data in before.items() if name != last.name
    }


def test_the_configuration_has_the_dtype_of_the_parameters(parallel, tmp_path):
    config = transformers.LlamaConfig(dtype="bfloat16")
    autotp.save_pretrained(parallel, tmp_path, config=config)
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "float32"
    assert str(config.dtype).endswith("bfloat16")


@st.composite
def split_tensors(draw):
    """Draws (shape, layout, mesh) with a valid layout."""
    shape = draw(st.sampled_from([(), (24,), (8, 12), (5, 7), (9, 4, 6), (0, 4)]))
    mesh = draw(st.sampled_from([(1,), (2,), (2, 2), (2, 3), (2, 4), (2, 2, 2)]))
    layout = [Replicate() for _ in mesh]
    for axis in range(len(mesh)):
        options = [Replicate()]
        for dim, blocks in itertools.product(range(len(shape)), (1, 2, 3, 4)):
            if fits(shape, (*layout[:axis], place(dim, blocks), *layout[axis + 1 :]), mesh):
                options.append(place(dim, blocks))
        layout[axis] = draw(st.sampled_from(options))
    return shape, tuple(layout), mesh


@settings(max_examples=300, deadline=None, derandomize=True)
@given(split_tensors())
def test_slices_make_up_what_a_device_takes(case):
    shape, layout, mesh = case
    whole = torch.arange(torch.Size(shape).numel()).reshape(shape)
    for at in itertools.product(*map(range, mesh)):
        wanted = take(whole, layout, mesh, at)
        found = torch.full_like(wanted, -1)
        for here, there in parts_of(shape, layout, mesh, at):
            assert torch.equal(found[here], torch.full_like(found[here], -1))
            found[here] = whole[there]
        assert torch.equal(found, wanted)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(split_tensors())
def test_parts_in_one_piece_are_where_torch_says(case):
    """Checkpoints leave the offsets of such parts to torch."""
    shape, layout, mesh = case
    for at in itertools.product(*map(range, mesh)):
        parts = list(parts_of(shape, layout, mesh, at))
        if len(parts) == 1 and restorable(layout, mesh):
            _, there = parts[0]
            sizes, offsets = _compute_local_shape_and_global_offset(shape, mesh, list(at), layout)
            assert offsets == tuple(each.start for each in there)
            assert sizes == tuple(each.stop - each.start for each in there)
