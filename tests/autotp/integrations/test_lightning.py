"""What the Lightning strategy refuses; ``tests/whole/test_torchrun.py`` tests that it trains as one process does."""

import os
from unittest import mock

import lightning
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelPruning, StochasticWeightAveraging
from torch import nn

import autotp
from autotp.integrations import lightning as _lightning
from autotp.integrations.lightning import AutotpStrategy


class Plain(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model, self.beside = nn.Linear(2, 2), nn.Linear(2, 2).requires_grad_(False)

    def training_step(self, x):
        return self.model(x).square().sum()

    def train_dataloader(self):
        return torch.utils.data.DataLoader(torch.arange(8.0).view(4, 2), 2)

    def configure_optimizers(self):
        return torch.optim.SGD(self.model.parameters(), lr=0.1)


class Distributed(Plain):
    def configure_model(self):
        self.model = autotp.parallelize(self.model, None, (torch.zeros(2, 2),))


@pytest.fixture
def one_rank(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def quiet(**options):
    settings = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    return settings | {"accelerator": "cpu", "devices": 1, "max_epochs": 1} | options


def trainer(sharded=True, **options):
    return lightning.Trainer(**quiet(strategy=AutotpStrategy(sharded), **options))


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed", "bf16-true", "64-true"])
def test_a_precision_is_refused(precision):
    with pytest.raises(autotp.AutotpError, match="pass precision= to autotp.parallelize"):
        trainer(precision=precision)


def test_no_sampler_deals_out_rows():
    made = trainer(devices=2, use_distributed_sampler=True)
    assert not made._data_connector._requires_distributed_sampler(torch.utils.data.DataLoader(torch.arange(4)))


def test_what_is_not_distributed_is_refused(one_rank):
    with pytest.raises(autotp.AutotpError, match="Plain has no distributed module: override its hook configure_model"):
        trainer().fit(Plain())
    module = Distributed()
    module.beside.requires_grad_(True)
    with pytest.raises(autotp.AutotpError, match="Distributed trains beside.weight, beside.bias, which is not in"):
        trainer().fit(module)


@pytest.mark.parametrize(
    ("callback", "instead"),
    [
        (ModelPruning("l1_unstructured", amount=0.5), "prune the model before it is distributed"),
        (StochasticWeightAveraging(1e-2), "use EMAWeightAveraging"),
    ],
)
def test_callbacks_that_change_a_plain_module_are_refused(one_rank, callback, instead):
    with pytest.raises(autotp.AutotpError, match=f"{type(callback).__name__} changes parameters of a plain.*{instead}"):
        trainer(callbacks=[callback]).fit(Distributed())


def test_a_module_is_distributed_once(one_rank):
    module = Distributed()
    trainer().fit(module)
    with pytest.raises(autotp.AutotpError, match="distributed already"):
        trainer().fit(module)


def test_a_checkpoint_takes_the_place_of_one_of_the_other_kind(one_rank, tmp_path):
    """Also for an optimizer without state."""
    path, wanted = tmp_path / "last.ckpt", Plain()
    start = {name: value.clone() for name, value in wanted.state_dict().items()}
    lightning.Trainer(**quiet(max_epochs=2)).fit(wanted)
    for sharded in (True, False, True):
        module = Distributed()
        module.load_state_dict(start)
        first = trainer(sharded)
        first.fit(module)
        first.save_checkpoint(path)
        assert path.is_dir() == sharded
        module = Distributed()
        trainer(sharded, max_epochs=2).fit(module, ckpt_path=path)
        torch.testing.assert_close(module.model.weight.full_tensor(), wanted.model.weight)


def test_a_checkpoint_stays_until_the_next_is_written(one_rank, tmp_path):
    save = torch.save

    def interrupted(what, where, **options):
        if str(where).endswith("meta.pt"):
            raise KeyboardInterrupt
        save(what, where, **options)

    path, first = tmp_path / "last.ckpt", trainer()
    first.fit(Distributed())
    first.save_checkpoint(path)
    before = {file.name: file.read_bytes() for file in path.iterdir()}
    (path / "__7_0.distcp").touch()  # of a job with more ranks
    with torch.no_grad():
        first.model.model.weight.add_(1)
    with mock.patch.object(_lightning.torch, "save", interrupted), pytest.raises(KeyboardInterrupt):
        first.save_checkpoint(path)
    assert {file.name: file.read_bytes() for file in path.iterdir() if file.name in before} == before
    first.save_checkpoint(path)
    after = {file.name: file.read_bytes() for file in path.iterdir()}
    assert after.keys() == before.keys() and after != before


@pytest.mark.parametrize("damaged", ["__0_0.distcp", "meta.pt", ".metadata"])
@pytest.mark.parametrize("gone", [False, True])
def test_a_checkpoint_that_is_not_whole_is_refused(one_rank, tmp_path, damaged, gone):
    path, first = tmp_path / "last.ckpt", trainer()
    first.fit(Distributed())
    first.save_checkpoint(path)
    if gone:
        (path / damaged).unlink()
    else:
        os.truncate(path / damaged, 10)
    with pytest.raises(autotp.AutotpError, match=r"last.ckpt has no whole checkpoint \(\w+: "):
        trainer(max_epochs=2).fit(Distributed(), ckpt_path=path)


@pytest.mark.parametrize("size", [0, 100])
def test_a_file_that_is_not_whole_is_refused(one_rank, tmp_path, size):
    path, first = tmp_path / "last.ckpt", trainer(sharded=False)
    first.fit(Distributed())
    first.save_checkpoint(path)
    os.truncate(path, size)
    with pytest.raises(autotp.AutotpError, match=r"last.ckpt has no whole checkpoint \(\w+: "):
        trainer(max_epochs=2).fit(Distributed(), ckpt_path=path)


def test_a_file_without_some_parameters_is_loaded_where_it_may_be(one_rank, tmp_path):
    path, plain = tmp_path / "last.ckpt", lightning.Trainer(**quiet())
    plain.fit(Plain())
    plain.save_checkpoint(path)
    checkpoint = torch.load(path, weights_only=True)
    del checkpoint["state_dict"]["model.bias"]
    checkpoint["optimizer_states"] = []  # which Lightning accepts, too
    torch.save(checkpoint, path)
    with pytest.raises(autotp.AutotpError, match=r"the checkpoint has no model\.bias: .* strict_loading = False"):
        trainer(max_epochs=2).fit(Distributed(), ckpt_path=path)
    module = Distributed()
    module.strict_loading = False
    trainer().fit(module, ckpt_path=path)
    assert torch.equal(module.model.weight.full_tensor(), checkpoint["state_dict"]["model.weight"])


class Unreached(Plain):
    """Some of its parameters have no gradient, so that the optimizer has no state for them."""

    def __init__(self):
        super().__init__()
        self.model.unused = nn.Parameter(torch.ones(3))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.model.parameters(), lr=0.1)


class DistributedUnreached(Unreached):
    configure_model = Distributed.configure_model


@pytest.mark.parametrize("sharded", [True, False])
def test_parameters_without_gradients_have_no_state_afterwards(one_rank, tmp_path, sharded):
    wanted, module = Unreached(), DistributedUnreached()
    start = {name: value.clone() for name, value in wanted.state_dict().items()}
    module.load_state_dict(start)
    lightning.Trainer(**quiet(max_epochs=2)).fit(wanted)
    first, second = trainer(sharded), trainer(max_epochs=2)
    first.fit(module)
    first.save_checkpoint(tmp_path / "last.ckpt")
    module = DistributedUnreached()
    second.fit(module, ckpt_path=tmp_path / "last.ckpt")
    torch.testing.assert_close(module.model.weight.full_tensor(), wanted.model.weight)
    assert {id(each) for each in second.optimizers[0].state} == {id(module.model.weight), id(module.model.bias)}


def test_other_numbers_of_processes_than_the_jobs_are_refused(one_rank, monkeypatch):
    for name in ("RANK", "LOCAL_RANK", "GROUP_RANK", "TORCHELASTIC_RUN_ID"):
        monkeypatch.setenv(name, "0")
    with pytest.raises(ValueError, match="does not match the world size"):
        trainer(devices=3).fit(Distributed())


def test_an_optimizer_of_other_parameters_is_refused(one_rank, tmp_path):
    class Fewer(Distributed):
        def configure_optimizers(self):
            return torch.optim.SGD([self.model.weight], lr=0.1)

    first = trainer(sharded=False)
    first.fit(Distributed())
    first.save_checkpoint(tmp_path / "last.ckpt")
    with pytest.raises(autotp.AutotpError, match="optimizer 0 of the checkpoint steps 2 parameters, and this one 1"):
        trainer(max_epochs=2).fit(Fewer(), ckpt_path=tmp_path / "last.ckpt")
