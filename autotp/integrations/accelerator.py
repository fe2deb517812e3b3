"""accelerate's ``Accelerator`` for distributed modules; needs accelerate."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from autotp.errors import AutotpError
from autotp.integrations.training_state import RANDOM, load_optimizer, load_random, require_global, save_optimizer
from autotp.runtime.checkpoint.load import load_pretrained
from autotp.runtime.checkpoint.random_state import RandomState
from autotp.runtime.checkpoint.save import save_pretrained, staged

try:
    import accelerate
    from accelerate.data_loader import prepare_data_loader
except ImportError as error:
    raise ImportError("autotp.integrations.accelerator needs accelerate: pip install 'accelerate>=1.15'") from error

__all__ = ["Accelerator"]


class Accelerator(accelerate.Accelerator):  # type: ignore[misc]
    """accelerate's ``Accelerator``, for modules that ``autotp.parallelize`` returned.

    Every rank gets the same batches, those of the whole job: the batch size of a data loader is that of the whole batch,
    and a scheduler steps once per optimizer step. Modules must take the whole batch and return whole tensors, which are the
    defaults of ``autotp.parallelize``. ``save_state`` writes the weights in Hugging Face's format, and the optimizer's
    state by ``torch.distributed.checkpoint``; a job with another plan or another number of ranks can load it.

    Args:
        options: of accelerate's ``Accelerator``. Options that change or wrap models raise an error.

    Raises:
        AutotpError: an option is not supported.
    """

    _models: list[Any]
    _optimizers: list[Any]

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        if self.mixed_precision != "no":
            raise AutotpError(f"mixed_precision={self.mixed_precision!r}: pass precision= to autotp.parallelize instead")
        kind = self.distributed_type.value
        if self.parallelism_config or kind in ("FSDP", "DEEPSPEED", "MEGATRON_LM", "XLA"):
            raise AutotpError(
                f"accelerate is to run {kind}: leave this to the plan, and launch the job with torchrun alone"
            )

    @property
    def split_batches(self) -> bool:
        """Whether the batch size of a data loader is that of the whole batch: always true."""
        return True

    def prepare_model(self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False) -> Any:
        """As accelerate's, but neither moves nor wraps a distributed module.

        Raises:
            AutotpError: the module is not distributed, or does not take whole batches and return whole outputs.
        """
        self.require_all_processes()
        return super().prepare_model(require_global(model), device_placement=False, evaluation_mode=True)

    def require_all_processes(self) -> None:
        """Checks that accelerate's number of processes is the job's; otherwise, each process would act as the main process.

        Raises:
            AutotpError: the numbers differ.
        """
        if dist.is_initialized() and dist.get_world_size() != self.num_processes:
            raise AutotpError(
                f"accelerate counts {self.num_processes} processes, and the job has {dist.get_world_size()}: where there "
                "are no GPUs, pass use_cpu=True to TrainingArguments, or cpu=True to Accelerator"
            )

    def prepare_data_loader(self, data_loader: Any, device_placement: bool | None = None, *rest: Any) -> Any:
        """As accelerate's, but every rank gets the same batches, in the same order."""
        if getattr(data_loader, "_is_accelerate_prepared", False):
            return super().prepare_data_loader(data_loader, device_placement, *rest)
        # All ranks use one seed, even if they were seeded differently.
        seed = [torch.initial_seed() if self.dataloader_config.data_seed is None else self.dataloader_config.data_seed]
        if dist.is_initialized():
            dist.broadcast_object_list(seed, device=self.device)
        prepared = prepare_data_loader(
            data_loader,
            self.device,
            num_processes=1,
            process_index=0,
            put_on_device=self.device_placement if device_placement is None else device_placement,
            rng_types=self.rng_types.copy(),
            dispatch_batches=False,
            use_seedable_sampler=True,
            data_seed=seed[0],
            non_blocking=self.non_blocking,
            use_stateful_dataloader=self.use_stateful_dataloader,
        )
        self._dataloaders.append(prepared)
        return prepared

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Returns the input, which is equal on all ranks, without a gather; the last batch is cut to its number of rows."""
        state = self.gradient_state
        if not state.end_of_dataloader or state.remainder <= 0:
            return input_data
        return accelerate.utils.recursively_apply(lambda each: each[: state.remainder] if each.dim() else each, input_data)

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """The whole state dict of a distributed module on rank 0, an empty dict on other ranks; a collective call."""
        return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))

    def save_state(self, output_dir: str | None = None, safe_serialization: bool = True, **options: Any) -> Any:
        """As accelerate's; a collective call. The directory's previous content is replaced once everything is written.

        Raises:
            AutotpError: no directory is given, or an optimizer's parameters are not those of exactly one prepared model.
        """
        if output_dir is None and not self.project_configuration.automatic_checkpoint_naming:
            raise AutotpError(
                "save_state(None): give a directory, or ProjectConfiguration(automatic_checkpoint_naming=True)"
            )
        named = self.project_configuration.automatic_checkpoint_naming  # every checkpoint has a new directory
        stepped = [_stepped(self._models, optimizer) for optimizer in self._optimizers]
        with nullcontext() if named else staged(Path(os.path.expanduser(output_dir or "")), RANDOM) as folder:
            with self._without_state() as (models, optimizers):
                where = super().save_state(output_dir if folder is None else str(folder), safe_serialization, **options)
            for number, model in enumerate(models):
                save_pretrained(model, Path(where, f"model_{number}"))
            for number, optimizer in enumerate(optimizers):
                save_optimizer(stepped[number], optimizer, Path(where, f"optimizer_{number}"))
            state = RandomState().state_dict()
            if self.is_main_process:
                torch.save(state, Path(where, RANDOM))
        self.wait_for_everyone()
        return where if named else output_dir

    def load_state(self, input_dir: str | None = None, load_kwargs: Any = None, **options: Any) -> None:
        """As accelerate's, for a directory that ``save_state`` wrote; a collective call."""
        where: list[str | os.PathLike[str]] = []
        hook = self.register_load_state_pre_hook(lambda _, directory: where.append(directory))
        try:
            with self._without_state() as (models, optimizers):
                super().load_state(input_dir, load_kwargs, **options)
        finally:
            hook.remove()
        for number, model in enumerate(models):
            load_pretrained(model, Path(where[0], f"model_{number}"))
        for number, optimizer in enumerate(optimizers):
            load_optimizer(_stepped(models, optimizer), optimizer, Path(where[0], f"optimizer_{number}"))
        load_random(Path(where[0], RANDOM))

    @contextmanager
    def _without_state(self) -> Iterator[tuple[list[Any], list[Any]]]:
        """Hides models and optimizers from accelerate, which would save or load one rank's part of their state."""
        models, optimizers = self._models, self._optimizers
        self._models, self._optimizers = [], []
        try:
            yield models, optimizers
        finally:
            self._models, self._optimizers = models, optimizers


def _stepped(models: list[Any], optimizer: Any) -> Any:
    """The model whose parameters an optimizer updates."""
    steps = {id(each) for group in optimizer.param_groups for each in group["params"]}
    found = [model for model in models if not steps.isdisjoint(map(id, model.parameters()))]
    if not found:
        raise AutotpError("an optimizer steps parameters of no prepared model: make it with what prepare() returned")
    if not steps <= {*map(id, found[0].parameters())}:
        raise AutotpError(
            "an optimizer steps parameters of more than one module: make one for each, whose state can be saved"
        )
    return found[0]
