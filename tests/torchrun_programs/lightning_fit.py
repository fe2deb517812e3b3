"""Lightning's Trainer with a distributed module, compared with the plain model in one process."""

import json
import logging
import os
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import lightning
import torch
import torch.distributed as dist
import torchmetrics
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.distributed.tensor import DTensor

import autotp

#: Variables that torchrun sets; without them, a process runs alone.
LAUNCHED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class Net(nn.Module):
    """Attention with a fused query-key-value weight, tied words, and dropout."""

    def __init__(self, dropout):
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)
        self.drop, self.head = nn.Dropout(dropout), nn.Linear(16, 32, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        x = self.embed(ids)
        q, k, v = (each.unflatten(-1, (4, 4)).transpose(1, 2) for each in self.qkv(x).chunk(3, -1))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.head(x + self.drop(self.out(mixed.transpose(1, 2).flatten(2))))


class Language(lightning.LightningModule):
    """A LightningModule as users write it; with ``strategy=None`` the model is not distributed."""

    def __init__(self, strategy=None, dropout=0.0, seed=0):
        super().__init__()
        lightning.seed_everything(seed, verbose=False)
        self.model, self.strategy, self.drawn, self.calls = Net(dropout).double(), strategy, True, []
        self.rows, self.mean = torchmetrics.SumMetric().double(), torchmetrics.MeanMetric().double()

    def configure_model(self):
        if self.strategy and not isinstance(self.model, autotp.DistributedModule):
            example = (torch.zeros(4, 8, dtype=torch.int64),)
            self.model = autotp.parallelize(self.model, None, example, strategy=self.strategy)

    def loss(self, ids):
        return nn.functional.cross_entropy(self.model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())

    def training_step(self, batch):
        (ids,) = batch
        loss = self.loss(ids) * (1 + self.drawn * torch.rand((), dtype=torch.float64))  # random, as diffusion's noise is
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        self.calls.append(loss.item())
        return loss

    def validation_step(self, batch):
        (ids,) = batch
        loss = self.loss(ids)
        self.rows.update(len(ids))
        self.mean.update(loss, len(ids))
        self.log("val_loss", loss, sync_dist=True)
        self.log_dict({"rows": self.rows, "mean": self.mean})

    def predict_step(self, batch):
        return self.model(batch[0]).sum(-1)

    def configure_optimizers(self):
        wide = [each for each in self.model.parameters() if each.dim() > 1]
        rest = [each for each in self.model.parameters() if each.dim() < 2]
        optimizer = torch.optim.AdamW([{"params": wide, "weight_decay": 0.1}, {"params": rest}], lr=1e-2)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def loaders(drawn=True):
    ids = torch.randint(32, (18, 8), generator=torch.Generator().manual_seed(0))
    rows = torch.utils.data.TensorDataset(ids)
    return torch.utils.data.DataLoader(rows, 4, shuffle=drawn), torch.utils.data.DataLoader(rows, 5)


def trained(module, folder, resume=None, *, drawn=True, sharded=True, seed=1, **options):
    """Returns the trainer after training; every epoch saves a checkpoint. Without ``drawn``, no random number matters."""
    torch.manual_seed(seed)
    module.drawn = drawn
    settings = {"max_epochs": 3, "accumulate_grad_batches": 2, "gradient_clip_val": 0.3, "log_every_n_steps": 1}
    if module.strategy:
        from autotp.integrations.lightning import AutotpStrategy

        settings |= {"strategy": AutotpStrategy(save_distributed_checkpoint=sharded), "devices": dist.get_world_size()}
    trainer = lightning.Trainer(
        **{"devices": 1} | settings | options, accelerator="cpu", logger=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=folder,
        callbacks=[ModelCheckpoint(folder, "{epoch}", save_top_k=-1, monitor="val_loss", save_last=True)],
    )  # fmt: skip
    trainer.fit(module, *loaders(drawn), ckpt_path=resume)
    return trainer


def found(trainer):
    """Everything that must be equal."""
    metrics = {name: value.item() for name, value in trainer.callback_metrics.items()}
    rates = [group["lr"] for group in trainer.optimizers[0].param_groups]
    return {"calls": trainer.lightning_module.calls, "metrics": metrics, "rates": rates, "steps": trainer.global_step}


def weights(module):
    return {name: whole(value).tolist() for name, value in module.model.named_parameters()}


def whole(value):
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach()


def shared_folder():
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    return Path(folder[0])


def plain(folder, **given):
    """Runs the plain model in one process, and returns its results."""
    if dist.get_rank() == 0:
        alone = {name: value for name, value in os.environ.items() if name not in LAUNCHED}
        subprocess.run([sys.executable, __file__, str(folder), json.dumps(given)], env=alone, check=True)
    dist.barrier()
    return json.loads((folder / "found.json").read_text())


def require_close(one, other, tolerance=1e-9):
    assert type(one) is type(other), (one, other)
    if isinstance(one, dict):
        assert one.keys() == other.keys(), (one.keys(), other.keys())
        for name in one:
            require_close(one[name], other[name], tolerance)
    elif isinstance(one, list):
        assert len(one) == len(other), (one, other)
        for pair in zip(one, other, strict=True):
            require_close(*pair, tolerance)
    else:
        assert abs(one - other) <= tolerance * max(1.0, abs(other)), (one, other)


def fits(strategy="megatron-1d", **options):
    """Shuffled batches with a smaller last one, accumulation, clipping, a learning-rate schedule, and validation."""
    folder = shared_folder()
    wanted = plain(folder / "plain", **options)
    # Ranks with different seeds shuffle as rank 0 does.
    trainer = trained(Language(strategy), folder, seed=1 + dist.get_rank(), **options)
    module = trainer.lightning_module
    require_close(found(trainer) | {"weights": weights(module)}, wanted)
    assert found(trainer)["metrics"]["rows"] == 18
    return folder, trainer, wanted


def by_norm():
    folder, trainer, wanted = fits()
    module = trainer.lightning_module
    assert len(module.model.programs) == 4, [*map(str, module.model.programs)]  # for 4 and 2 rows, and for 5 and 3
    (metrics,) = trainer.validate(module, loaders()[1], ckpt_path="best", verbose=False)
    require_close(metrics["val_loss"], trainer.checkpoint_callback.best_model_score.item())
    assert torch.cat(trainer.predict(module, loaders()[1])).shape == (18, 8)


def by_value():
    fits("zero3", gradient_clip_algorithm="value", gradient_clip_val=1e-3)


def resumes():
    """Resumes from the plain model's checkpoint, then with another plan from a folder, then in one process from a file."""
    folder = shared_folder()
    wanted = plain(folder / "plain", drawn=False, max_epochs=4)["calls"]
    calls, resume = wanted[:5], folder / "plain" / "epoch=0.ckpt"
    for epochs, strategy, sharded in ((2, "megatron-1d", True), (3, "zero3", False)):
        module, into = Language(strategy, seed=7), folder / strategy
        trained(module, into, resume, drawn=False, sharded=sharded, max_epochs=epochs)
        calls, resume = calls + module.calls, into / f"epoch={epochs - 1}.ckpt"
        assert resume.is_dir() == sharded
    rest = plain(folder / "rest", drawn=False, resume=str(resume), max_epochs=4)
    require_close(calls + rest["calls"], wanted)
    if dist.get_rank() == 0:
        tool = [sys.executable, "-m", "lightning.pytorch.utilities.consolidate_checkpoint"]
        one = folder / "one.ckpt"
        subprocess.run([*tool, folder / "megatron-1d" / "epoch=1.ckpt", "--output_file", one], check=True)
    rest = plain(folder / "rest", drawn=False, resume=str(folder / "one.ckpt"), max_epochs=4)
    require_close(calls[:10] + rest["calls"], wanted)


def resumes_with_dropout():
    """A resumed run draws the masks that an uninterrupted run draws."""
    for sharded in (True, False):
        folder = shared_folder()
        whole, rest = Language("megatron-1d", dropout=0.2), Language("megatron-1d", dropout=0.2, seed=7)
        trained(whole, folder, drawn=False, sharded=sharded, max_epochs=2)
        trained(rest, folder / "rest", folder / "epoch=0.ckpt", drawn=False, sharded=sharded, max_epochs=2, seed=5)
        assert whole.calls[5:] == rest.calls, (whole.calls, rest.calls)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
        globals()[sys.argv[1]]()
        if dist.get_rank() == 0:
            print("passed")
        dist.destroy_process_group()
    else:
        into, options = Path(sys.argv[1]), json.loads(sys.argv[2])
        alone = trained(Language(), into, **options)
        (into / "found.json").write_text(json.dumps(found(alone) | {"weights": weights(alone.lightning_module)}))
