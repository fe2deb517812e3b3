"""A strategy of Lightning's ``Trainer`` for LightningModules that contain distributed modules; needs lightning."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from autotp.errors import AutotpError
from autotp.integrations.training_state import load_optimizer, optimizer_state, reading, require_global, set_optimizer
from autotp.runtime.agreement import told
from autotp.runtime.checkpoint.random_state import RandomState
from autotp.runtime.checkpoint.save import staged
from autotp.runtime.module import DistributedModule

try:
    from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
    from lightning.fabric.utilities.distributed import (
        _get_default_process_group_backend_for_device,
        _init_dist_connection,
    )
    from lightning.fabric.utilities.seed import _collect_rng_states, _set_rng_states, pl_worker_init_function
    from lightning.pytorch.callbacks import ModelPruning, StochasticWeightAveraging
    from lightning.pytorch.plugins.precision import Precision
    from lightning.pytorch.strategies import ParallelStrategy
    from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
    from lightning.pytorch.utilities.rank_zero import rank_zero_only
    from torchmetrics import Metric
except ImportError as error:
    raise ImportError("autotp.integrations.lightning needs lightning: pip install 'lightning>=2.6,<3'") from error

__all__ = ["AutotpStrategy"]

_METADATA = "meta.pt"  # Lightning's name of the file with all that is not sharded
_PARTS = re.compile(r"__\d+_\d+\.distcp")  # files of torch.distributed.checkpoint
_RANDOM = "autotp_random"
#: Callbacks that would have no effect, or fail -> what to do instead.
_REFUSED = {
    ModelPruning: "prune the model before it is distributed",
    StochasticWeightAveraging: "use EMAWeightAveraging",
}


class AutotpStrategy(ParallelStrategy):  # type: ignore[misc]
    """A strategy of Lightning's ``Trainer``, for modules that ``autotp.parallelize`` returned.

    The LightningModule calls ``autotp.parallelize`` in its hook ``configure_model``, or holds a module that was distributed
    before. Every rank gets the same batches, those of the whole job, so the batch size of a data loader is that of the
    whole batch: no ``DistributedSampler`` is inserted, all ranks continue from rank 0's random state whenever a loader is
    iterated, and logged values and metrics are those of one process, with or without ``sync_dist``.

    Args:
        save_distributed_checkpoint: write a checkpoint as a folder, by ``torch.distributed.checkpoint``; else as one file,
            which rank 0 gathers, and which the unmodified model in one process can load. Both kinds, and files of the
            unmodified model, are loaded, independently of the plan and the number of ranks that wrote them.
        process_group_backend: by default ``nccl`` on GPUs, and ``gloo`` on CPUs.
        timeout: of the process group.

    Raises:
        AutotpError: the trainer has a ``precision``, or a callback that prunes or averages a plain module, or the
            LightningModule trains parameters that are not distributed.
    """

    def __init__(
        self,
        save_distributed_checkpoint: bool = True,
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
    ) -> None:
        super().__init__()
        self.num_nodes = 1
        self._sharded = save_distributed_checkpoint
        self._backend, self._timeout = process_group_backend, timeout
        self._modules: list[DistributedModule] = []

    @property
    def is_distributed(self) -> bool:
        """Whether Lightning has to split batches among ranks and reduce results: always false."""
        return False

    @property
    def root_device(self) -> torch.device:
        """This rank's device."""
        found: torch.device = self.parallel_devices[self.local_rank]
        return found

    @property
    def num_processes(self) -> int:
        """The number of processes on this node."""
        return len(self.parallel_devices or ())

    @property
    def precision_plugin(self) -> Any:
        """Lightning's default plugin, which converts nothing."""
        return super().precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, plugin: Any) -> None:
        if plugin is not None and type(plugin) is not Precision:
            raise AutotpError(
                f"Trainer(precision={plugin.precision!r}) would convert a distributed module: leave it out. For mixed "
                "precision pass precision= to autotp.parallelize; for another dtype cast the model before it is distributed"
            )
        self._precision_plugin = plugin

    def _configure_launcher(self) -> None:
        if not self.cluster_environment.creates_processes_externally:
            self._launcher = _SubprocessScriptLauncher(self.cluster_environment, self.num_processes, self.num_nodes)

    def set_world_ranks(self) -> None:
        """Sets this process's rank and the number of ranks in Lightning."""
        if self.cluster_environment is not None:
            self.cluster_environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
            self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        rank_zero_only.rank = self.global_rank

    def setup_environment(self) -> None:
        """Creates the process group, unless there is one."""
        super().setup_environment()
        self.cluster_environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        self.set_world_ranks()
        backend = self._backend or _get_default_process_group_backend_for_device(self.root_device)
        device = self.root_device if self.root_device.type != "cpu" else None
        _init_dist_connection(self.cluster_environment, backend, timeout=self._timeout, device_id=device)
        # torchrun sets these variables, and autotp.Topology.local() reads them; Lightning and SLURM do not set them.
        os.environ.setdefault("WORLD_SIZE", str(self.world_size))
        os.environ.setdefault("LOCAL_WORLD_SIZE", str(self.num_processes))

    def tensor_init_context(self, empty_init: bool | None = None) -> AbstractContextManager[Any]:
        """The device on which models are made: ``meta`` with ``empty_init``, else unchanged; they are distributed later."""
        return torch.device("meta") if empty_init else nullcontext()

    def model_to_device(self) -> None:
        """Moves the other parts of the LightningModule; distributed modules are already on the device."""
        self.model.to(self.root_device)

    def _setup_model(self, model: nn.Module) -> nn.Module:
        self._modules = [require_global(each) for each in model.modules() if isinstance(each, DistributedModule)]
        name = type(model).__name__
        if not self._modules:
            raise AutotpError(
                f"{name} has no distributed module: override its hook configure_model, and there call "
                "self.model = autotp.parallelize(self.model, ...)"
            )
        plain = [name for name, each in model.named_parameters() if each.requires_grad and not isinstance(each, DTensor)]
        if plain:
            raise AutotpError(
                f"{name} trains {', '.join(plain[:4])}, which is not in a distributed module: make it a part of the model "
                "that is distributed, or freeze it"
            )
        for kind, instead in _REFUSED.items():
            if any(isinstance(each, kind) for each in self.lightning_module.trainer.callbacks):
                raise AutotpError(f"the callback {kind.__name__} changes parameters of a plain module: {instead}")
        for each in model.modules():
            if isinstance(each, Metric):  # every rank has all rows, so a metric must not gather those of other ranks
                each.distributed_available_fn = _alone
        return model

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Leaves the gradients of all but the last micro-batch of an accumulated step unreduced."""
        with ExitStack() as stack:
            for each in self._modules:
                stack.enter_context(each.no_sync())
            yield

    def process_dataloader(self, dataloader: Any) -> Any:
        """Wraps a loader so that all ranks draw the same random numbers as rank 0."""
        if int(os.environ.get("PL_SEED_WORKERS", 0)) and getattr(dataloader, "worker_init_fn", self) is None:
            dataloader.worker_init_fn = partial(pl_worker_init_function, rank=0)
        return _Loader(dataloader, self._draw_alike)

    def _draw_alike(self) -> None:
        _set_rng_states(self.broadcast(_collect_rng_states(include_cuda=False)))
        if self.root_device.type == "cuda":
            torch.cuda.set_rng_state(self.broadcast(torch.cuda.get_rng_state(self.root_device)), self.root_device)

    def barrier(self, name: str | None = None) -> None:
        """Waits for all ranks."""
        if dist.is_initialized():
            dist.barrier(device_ids=[self.root_device.index] if self.root_device.type == "cuda" else None)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Returns the object of rank ``src`` on all ranks."""
        objects = [obj]
        if dist.is_initialized():
            dist.broadcast_object_list(objects, src)
        return objects[0]

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Returns the tensor unchanged: it is a value of the whole batch, the same on every rank."""
        return tensor

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Whether all ranks (with ``all``) or any rank passed True."""
        made = torch.tensor(int(decision), device=self.root_device)
        dist.all_reduce(made, dist.ReduceOp.MIN if all else dist.ReduceOp.MAX)
        return bool(made)

    def teardown(self) -> None:
        """Tears down Lightning's parts; distributed modules stay on their devices."""
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The LightningModule's state dict, sharded, or whole on rank 0; a collective call."""
        found: dict[str, Any] = get_model_state_dict(self.lightning_module, options=self._options())
        return found

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """An optimizer's state, sharded and by names, or whole and by numbers as in one process; a collective call."""
        state = optimizer_state(self.lightning_module, getattr(optimizer, "_optimizer", optimizer), self._options())
        if self._sharded or not state:
            return state
        return _renamed(state, {name: number for number, name in enumerate(_stepped(state))})

    def _options(self) -> StateDictOptions:
        return StateDictOptions(full_state_dict=not self._sharded, cpu_offload=not self._sharded)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Writes a checkpoint; a collective call. One of the same name and kind is kept until the new one is written."""
        checkpoint[_RANDOM] = RandomState().state_dict()
        path = Path(self.broadcast(filepath))
        if self.is_global_zero and (path.is_file() if self._sharded else (path / _METADATA).is_file()):
            self.remove_checkpoint(path)  # it is of the other kind
        self.barrier()
        if not self._sharded:
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        states = checkpoint.pop("optimizer_states", ())
        # Lightning's tool that converts the folder to a single file expects these names.
        state = {"model": checkpoint.pop("state_dict")} | {f"optimizer_{i}": each for i, each in enumerate(states)}
        with staged(path, _METADATA, _PARTS) as folder:
            with told(f"saving {path}"):
                dcp.save(state, checkpoint_id=folder)
            if self.is_global_zero:
                torch.save(checkpoint, folder / _METADATA)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Reads a checkpoint; a collective call. Optimizers' states in a folder are read by `load_optimizer_state_dict`."""
        path = Path(self.broadcast(checkpoint_path))
        if not path.is_dir():
            with reading(path, "checkpoint") if path.is_file() else nullcontext():
                return super().load_checkpoint(checkpoint_path, weights_only)
        state = {"model": get_model_state_dict(self.lightning_module)}
        partial_load = not self.lightning_module.strict_loading
        with reading(path, "checkpoint"):
            checkpoint: dict[str, Any] = torch.load(path / _METADATA, weights_only=weights_only)
            dcp.load(state, checkpoint_id=path, planner=dcp.DefaultLoadPlanner(allow_partial_load=partial_load))
            checkpoint["state_dict"] = state["model"]
        if "lr_schedulers" in checkpoint:  # not with save_weights_only
            checkpoint["optimizer_states"] = path
        return checkpoint

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Sets the LightningModule's state.

        Raises:
            AutotpError: with ``strict``, if the checkpoint lacks entries of the state.
        """
        state = dict(checkpoint["state_dict"])
        whole = not any(isinstance(each, DTensor) for each in state.values())
        if strict and (missing := sorted(self.lightning_module.state_dict().keys() - state)):
            raise AutotpError(
                f"the checkpoint has no {', '.join(missing)}: take one of this model, or set strict_loading = False of the "
                "LightningModule"
            )
        set_model_state_dict(self.lightning_module, state, options=StateDictOptions(full_state_dict=whole, strict=strict))

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Sets the states of optimizers and of torch's generators; a collective call."""
        given = checkpoint["optimizer_states"]
        names = {parameter: name for name, parameter in self.lightning_module.named_parameters()}
        for number, optimizer in enumerate(self.optimizers):
            if isinstance(given, Path):
                load_optimizer(self.lightning_module, optimizer, given, f"optimizer_{number}")
            elif number < len(given):  # as in Lightning, others stay as they are
                own = [names[each] for group in optimizer.param_groups for each in group["params"]]
                others = _stepped(given[number])
                if len(others) != len(own):
                    raise AutotpError(
                        f"optimizer {number} of the checkpoint steps {len(others)} parameters, and this one {len(own)}: "
                        "resume with an optimizer of the same parameters"
                    )
                state = _renamed(given[number], dict(zip(others, own, strict=True)))
                set_optimizer(self.lightning_module, optimizer, state, whole=True)
        if _RANDOM in checkpoint:
            RandomState().load_state_dict(checkpoint[_RANDOM])


class _Loader:
    """Wraps a data loader, and calls ``before`` whenever an iteration begins."""

    def __init__(self, loader: Any, before: Any) -> None:
        self._loader, self._before = loader, before

    def __iter__(self) -> Iterator[Any]:
        self._before()
        return iter(self._loader)

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        if name == "_loader":
            raise AttributeError(name)
        return getattr(self._loader, name)


def _alone() -> bool:
    """For a metric's ``distributed_available_fn``: whether it has to gather from other ranks; always false."""
    return False


def _stepped(state: Mapping[str, Any]) -> list[Any]:
    """The names or numbers of an optimizer's parameters, in its order."""
    return [each for group in state["param_groups"] for each in group["params"]]


def _renamed(state: Mapping[str, Any], names: Mapping[Any, Any]) -> dict[str, Any]:
    """An optimizer's state whose parameters are renamed by ``names``."""
    groups = [{**group, "params": [names[each] for each in group["params"]]} for group in state["param_groups"]]
    return {"state": {names[each]: value for each, value in state["state"].items()}, "param_groups": groups}
