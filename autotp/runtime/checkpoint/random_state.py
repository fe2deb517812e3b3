"""The states of torch's generators, as a ``Stateful`` for ``torch.distributed.checkpoint``."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from autotp.errors import AutotpError
from autotp.runtime.agreement import JobAgreement
from costmodel.errors import shown

__all__ = ["RandomState"]


class RandomState:
    """The states of torch's default generators on rank 0, from which dropout draws on every rank.

    It is ``Stateful``, as a module is: ``dcp.save({"model": parallel, "random": autotp.RandomState()})`` saves the states,
    and ``dcp.load`` of the same dict sets the generators of every rank. The state dict has the entries ``cpu`` (of
    ``torch.get_rng_state()``, which a single process can pass to ``torch.set_rng_state``) and, if there are GPUs, ``cuda``
    (of the current GPU).
    """

    def state_dict(self) -> dict[str, Tensor]:
        """Rank 0's states, on every rank; a collective call in a job.

        Raises:
            CollectiveError: another rank does not take part in the call.
        """
        states = [torch.get_rng_state()]
        if torch.cuda.is_available():
            states.append(torch.cuda.get_rng_state())
        if dist.is_initialized():
            states = JobAgreement().decided(lambda: states)
        return dict(zip(("cpu", "cuda"), states, strict=False))

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Sets this process's generators.

        Args:
            state: what ``state_dict`` returned. On CPUs, the entry ``cuda`` of a job on GPUs is ignored.

        Raises:
            AutotpError: ``state`` has no valid states of generators.
        """
        found = state if isinstance(state, Mapping) else {}
        if "cpu" not in found or not all(isinstance(value, Tensor) for value in found.values()):
            raise AutotpError(f"{shown(state)} is no state of torch's generators: it needs a tensor named 'cpu'")
        try:
            torch.set_rng_state(state["cpu"])
            if torch.cuda.is_available() and "cuda" in state:
                torch.cuda.set_rng_state(state["cuda"])
        except (RuntimeError, TypeError) as error:
            raise AutotpError(f"this is no state of torch's generators: {error}") from error
