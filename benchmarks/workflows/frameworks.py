"""More rows: the training loops of other frameworks."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from benchmarks.workflows.rows import SGD, row
from benchmarks.workflows.side import Side, batch
from benchmarks.workflows.state import ADAMW

__all__ = ["fitted"]

FRAMEWORKS = "Frameworks"


def _by_hand(plain: Any, optimizer: torch.optim.Optimizer, batches: Any) -> Iterator[float]:
    """Trains the plain model for an epoch, with gradients accumulated over two batches and clipped; yields losses."""
    for number, data in enumerate(batches):
        found = plain(**data) if isinstance(data, dict) else plain(*data)
        loss = found if isinstance(found, torch.Tensor) else found.loss
        (loss / 2).backward()
        if number % 2:
            nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
        yield loss.item()


def _loader(side: Side) -> DataLoader[Any]:
    """A loader of four batches: global ones for autotp, and this rank's rows for FSDP2."""
    rows = TensorDataset(*batch(32))
    if side.ours:
        return DataLoader(rows, 8)
    return DataLoader(rows, 8 // side.ranks, sampler=DistributedSampler(rows, side.ranks, side.rank, shuffle=False))


def fitted(side: Side, model: nn.Module, epochs: int = 1, resume: str | None = None, beside: Any = None, **how: Any) -> Any:
    """Fits a LightningModule that distributes the model; returns Lightning's trainer."""
    import lightning
    from lightning.pytorch.strategies import ModelParallelStrategy

    from autotp.integrations.lightning import AutotpStrategy

    class Loop(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model, self.beside, self.losses = model, beside, list[float]()

        def configure_model(self) -> None:
            self.model = side.distribute(self.model, **how)

        def training_step(self, data: Any) -> torch.Tensor:
            loss = self.model(*data)
            self.losses.append(float(side.mean(loss)))
            return loss if beside is None else loss * self.beside.weight.sum()

        def validation_step(self, data: Any) -> None:
            self.losses.append(float(side.mean(self.model(*data))))

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return SGD(self.parameters())

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    trainer = lightning.Trainer(
        strategy=AutotpStrategy() if side.ours else ModelParallelStrategy(side.ranks, 1), accelerator="cpu",
        devices=side.ranks, max_epochs=epochs, accumulate_grad_batches=2, gradient_clip_val=0.1, num_sanity_val_steps=0,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Loop(), _loader(side), _loader(side), ckpt_path=resume)
    return trainer


@row(FRAMEWORKS, "Lightning's `Trainer`: accumulation, clipping, validation; a checkpoint, and resuming from it")
def _lightning(side: Side) -> float:
    model, plain = side.model()
    checkpoint = str(Path(side.folder(), "last.ckpt"))
    first = fitted(side, copy.deepcopy(model))
    first.save_checkpoint(checkpoint)
    second = fitted(side, model, 2, checkpoint, **({"strategy": "megatron-1d"} if side.ours else {}))
    losses, optimizer = list[float](), SGD(plain.parameters())
    batches = [*DataLoader(TensorDataset(*batch(32)), 8)]
    for _ in range(2):
        losses += _by_hand(plain, optimizer, batches)
        with torch.no_grad():
            losses += [plain(*data).item() for data in batches]
    found = first.lightning_module.losses + second.lightning_module.losses
    apart = max(abs(one - other) for one, other in zip(found, losses, strict=True))
    return max(apart, side.apart(second.lightning_module.model, plain))


@row(FRAMEWORKS, "transformers' `Trainer`: accumulation, clipping; a checkpoint, and resuming from it", tolerance=1e-7)
def _trainer(side: Side) -> float | str:
    if not side.ours:
        return "on GPUs only"
    from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

    from autotp.integrations.trainer import Trainer

    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=4, use_cache=False
    )
    torch.manual_seed(0)
    model, folder = LlamaForCausalLM(config).double(), side.folder()
    rows = [{"input_ids": ids, "labels": ids} for ids in batch(16)[0]]
    whole = {name: torch.stack([each[name] for each in rows]) for name in rows[0]}
    example = {name: value[:8] for name, value in whole.items()} | {"num_items_in_batch": torch.tensor(1.0)}
    for epochs, strategy in ((1, "zero3"), (2, "megatron-1d")):
        args = TrainingArguments(
            folder, per_device_train_batch_size=8, gradient_accumulation_steps=2, num_train_epochs=epochs,
            learning_rate=1e-2, lr_scheduler_type="constant", max_grad_norm=0.1, save_strategy="epoch", report_to="none",
            use_cpu=True, disable_tqdm=True,
        )  # fmt: skip
        module = side.distribute(copy.deepcopy(model), (), kwargs=example, strategy=strategy)
        Trainer(module, args, train_dataset=rows).train(resume_from_checkpoint=epochs == 2)
    optimizer = ADAMW(model.parameters(), weight_decay=0.0)
    for _ in range(2):  # each step has all rows, so their order does not matter
        [*_by_hand(model, optimizer, [{name: value[part] for name, value in whole.items()} for part in _HALVES])]
    return side.apart(module, model)


_HALVES = (slice(8), slice(8, 16))


@row(FRAMEWORKS, "accelerate: `prepare`, `accumulate`, clipping; `save_state` and `load_state`")
def _accelerate(side: Side) -> float | str:
    if not side.ours:
        return "on GPUs only"
    from accelerate.state import AcceleratorState, GradientState

    from autotp.integrations.accelerator import Accelerator

    AcceleratorState._reset_state(reset_partial_state=True)  # drop the state of an earlier row
    GradientState._reset_state()
    model, plain = side.model()
    folder, losses = side.folder(), list[float]()
    for epoch, strategy in enumerate(("zero3", "megatron-1d")):
        accelerator = Accelerator(gradient_accumulation_steps=2, cpu=True)
        module = side.distribute(copy.deepcopy(model), strategy=strategy)
        module, optimizer, loader = accelerator.prepare(module, SGD(module.parameters()), _loader(side))
        if epoch:
            accelerator.load_state(folder)
        for data in loader:
            with accelerator.accumulate(module):
                loss = module(*data)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(module.parameters(), 0.1)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
        accelerator.save_state(folder)
        accelerator.free_memory()
    own = SGD(plain.parameters())
    wanted = [loss for _ in range(2) for loss in _by_hand(plain, own, DataLoader(TensorDataset(*batch(32)), 8))]
    apart = max(abs(one - other) for one, other in zip(losses, wanted, strict=True))
    return max(apart, side.apart(module, plain))
