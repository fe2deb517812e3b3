"""transformers' ``Trainer`` for distributed modules; needs transformers and accelerate."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autotp.errors import AutotpError
from autotp.integrations.accelerator import Accelerator
from autotp.integrations.adapters import is_adapted, load_adapter, save_adapter
from autotp.integrations.training_state import (
    RANDOM,
    load_optimizer,
    load_random,
    reading,
    require_global,
    save_optimizer,
)
from autotp.runtime.checkpoint.load import load_pretrained
from autotp.runtime.checkpoint.random_state import RandomState
from autotp.runtime.checkpoint.save import save_pretrained
from autotp.runtime.programs import blueprint
from costmodel.errors import require

try:
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    from transformers.trainer import SCHEDULER_NAME, TRAINING_ARGS_NAME
except ImportError as error:
    raise ImportError(
        "autotp.integrations.trainer needs transformers and accelerate: pip install 'transformers>=5.23,<6' accelerate"
    ) from error

__all__ = ["Trainer"]

_OPTIMIZER = "optimizer"
#: Training arguments that would change or wrap the model -> what to do instead.
_REFUSED = {
    "bf16": "pass precision= to autotp.parallelize",
    "fp16": "pass precision= to autotp.parallelize",
    "bf16_full_eval": "pass precision= to autotp.parallelize",
    "fp16_full_eval": "pass precision= to autotp.parallelize",
    "gradient_checkpointing": "pass recompute= to autotp.parallelize",
    "activation_checkpointing": "pass recompute= to autotp.parallelize",
    "torch_compile": "pass compile=True to autotp.parallelize",
    "neftune_noise_alpha": "add the noise in the model, before it is distributed",
    "use_liger_kernel": "change the model, before it is distributed",
    "auto_find_batch_size": "give the batch size; autotp.plan says what memory a batch takes",
    "fsdp": "leave it out; the plan says how parameters are sharded",
    "deepspeed": "leave it out; the plan says how parameters are sharded",
    "parallelism_config": "leave it out; the plan says how the job is split",
}


class Trainer(transformers.Trainer):  # type: ignore[misc]
    """transformers' ``Trainer``, for a module that ``autotp.parallelize`` returned.

    Every rank gets the same batch, of ``per_device_train_batch_size`` rows: this is the size of the whole batch. Losses,
    metrics and the learning rate are those of the original model in one process. A checkpoint has the weights in Hugging
    Face's format (for a model of peft, only the adapter), and the optimizer's state as ``torch.distributed.checkpoint``
    writes it; a job with another plan or another number of ranks can resume from it.

    Args:
        model: what ``autotp.parallelize`` returned for a model of transformers, of peft, or any that returns its loss
            first. It must take the whole batch on every rank and return whole tensors, which are the defaults.
        args: ``transformers.TrainingArguments``; arguments that would change or wrap the model raise an error.
        rest, options: further arguments of transformers' ``Trainer``, except ``model_init``.

    Raises:
        AutotpError: ``model`` is not such a module, or an argument is not supported.
    """

    def __init__(self, model: nn.Module, args: Any = None, *rest: Any, **options: Any) -> None:
        parallel = require_global(model)
        if args is not None:
            _check(args)
        # Trainer inspects the model's class, signature and configuration: give it a copy whose parameters have no memory.
        known = parallel._programs.model
        shell = known if isinstance(known, AutotpError) else blueprint(known)
        if isinstance(shell, AutotpError):
            raise shell
        self._shell: Any = shell
        super().__init__(shell, args, *rest, **options)
        self.accelerator.require_all_processes()
        self._set_signature_columns_if_needed()
        self.model = self.model_wrapped = self.callback_handler.model = parallel
        # Trainer's flag for models that are already sharded, which accelerate must neither wrap nor move.
        self.is_distributed_loading_by_transformers = True
        if self.label_smoother is not None:  # Trainer would use the class name of the distributed module
            inner = getattr(shell.base_model, "model", shell) if is_adapted(shell) else shell
            shifts = type(inner).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
            self.label_smoother: Any = partial(self.label_smoother, shift_labels=shifts)
        if (config := getattr(shell, "config", None)) is not None:
            config.architectures = [type(shell).__name__]

    def train(self, *args: Any, **options: Any) -> Any:
        """As Trainer's, but writes the tokenizer's special tokens to the configuration that is saved, not the module's."""
        align = transformers.trainer.align_special_tokens
        with mock.patch.object(transformers.trainer, "align_special_tokens", lambda _, own: align(self._shell, own)):
            return super().train(*args, **options)

    def create_accelerator_and_postprocess(self) -> None:
        """As Trainer's, but creates autotp's ``Accelerator``."""
        super().create_accelerator_and_postprocess()
        self.accelerator = Accelerator(**self._accelerator_options)
        self.gather_function = self.accelerator.gather_for_metrics

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        self._accelerator_options: dict[str, Any] = super()._build_accelerator_args(**kwargs)
        return self._accelerator_options

    def get_tp_size(self) -> int:
        """The number of ranks that get the same batch: all ranks."""
        return int(self.args.world_size)

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Does nothing, as the distributed module is already on its device."""

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        norm = super()._get_grad_norm(model, grad_norm=grad_norm)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def prediction_step(
        self, model: nn.Module, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Tensor | None, Any, Any]:
        """As Trainer's, with the outputs to ignore from the original model's configuration."""
        if ignore_keys is None and hasattr(self._shell, "config"):
            ignore_keys = getattr(self._shell.config, "keys_to_ignore_at_inference", ["past_key_values"])
        found: tuple[Any, Any, Any] = super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        return found

    def _get_num_items_in_batch(self, batch_samples: list, device: torch.device) -> Any:
        found = super()._get_num_items_in_batch(batch_samples, device)
        # Trainer divides by the number of ranks with the same batch, but sums over all ranks only with this setting.
        return found if found is None or self.args.average_tokens_across_devices else found * self.get_tp_size()

    def _track_num_input_tokens(self, inputs: dict[str, Any]) -> None:
        before = self.state.num_input_tokens_seen
        super()._track_num_input_tokens(inputs)
        self.state.num_input_tokens_seen = before + (self.state.num_input_tokens_seen - before) // self.get_tp_size()

    def floating_point_ops(self, inputs: dict[str, Any]) -> float:
        """This rank's share of the FLOP of a step of the whole model, as Trainer sums them over all ranks."""
        main = getattr(self._shell, "main_input_name", "input_ids")
        if main not in inputs or not hasattr(self._shell, "num_parameters"):
            return 0
        whole: int = 6 * inputs[main].numel() * self._shell.num_parameters(exclude_embeddings=True)
        return whole / self.args.world_size

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        directory = self.args.output_dir if output_dir is None else output_dir
        if is_adapted(self._shell):
            save_adapter(self.model, self._shell, directory, writes=self.args.should_save)
        else:
            save_pretrained(self.model, directory, config=getattr(self._shell, "config", None))
        if not self.args.should_save:
            return
        words = self.processing_class or getattr(self.data_collator, "tokenizer", None)
        if words is not None:
            words.save_pretrained(directory)
        torch.save(self.args, Path(directory, TRAINING_ARGS_NAME))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        if is_adapted(self._shell):
            load_adapter(self.model, self._shell, resume_from_checkpoint)
        else:
            load_pretrained(self.model, resume_from_checkpoint)

    def _load_best_model(self) -> None:
        self._load_from_checkpoint(self.state.best_model_checkpoint)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        save_optimizer(self.model, self.optimizer, Path(output_dir, _OPTIMIZER))
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir, SCHEDULER_NAME))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None or not Path(checkpoint, SCHEDULER_NAME).exists():  # written with save_only_model
            return
        if not Path(checkpoint, _OPTIMIZER).is_dir():
            raise AutotpError(
                f"{checkpoint} has {SCHEDULER_NAME}, but no folder {_OPTIMIZER!r}, in which this Trainer saves the "
                "optimizer's state; transformers' own saves it otherwise. To train on with a new state, remove "
                f"{SCHEDULER_NAME}, too"
            )
        load_optimizer(self.model, self.optimizer, Path(checkpoint, _OPTIMIZER))
        with reading(file := Path(checkpoint, SCHEDULER_NAME), "state of the scheduler"):
            self.lr_scheduler.load_state_dict(torch.load(file, weights_only=True))

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)
        state = RandomState().state_dict()
        if self.args.should_save:
            torch.save(state, Path(output_dir, RANDOM))

    def _load_rng_state(self, checkpoint: str | None) -> None:
        super()._load_rng_state(checkpoint)
        if checkpoint is not None and Path(checkpoint, RANDOM).is_file():
            load_random(Path(checkpoint, RANDOM))


def _check(args: Any) -> None:
    """Raises if an argument is not supported."""
    require(args, transformers.TrainingArguments, "args", "transformers.TrainingArguments")
    for name, instead in _REFUSED.items():
        if getattr(args, name, None):
            raise AutotpError(f"TrainingArguments({name}=…) would change or wrap a distributed module: {instead}")
    if args.optim == "adafactor":
        raise AutotpError("TrainingArguments(optim='adafactor'): transformers' Adafactor takes no DTensor; use AdamW")
