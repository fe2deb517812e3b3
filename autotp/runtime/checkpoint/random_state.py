"""Where torch's generators stand, as ``torch.distributed.checkpoint`` takes it beside weights and optimizer."""

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
    """Where random numbers stand: torch's own generators as rank 0 has them, from which dropout draws on every rank.

    It is ``Stateful``, as a module is: ``dcp.save({"model": parallel, "random": autotp.RandomState()})`` saves it, and
    ``dcp.load`` of the same sets the generators of every rank. What it saves has the entries ``cpu`` (what
    ``torch.get_rng_state()`` gives, which a plain process can give to ``torch.set_rng_state``) and, where there are GPUs,
    ``cuda`` (of the current one).
    """

    def state_dict(self) -> dict[str, Tensor]:
        """Rank 0's states, the same on every rank; a collective call in a job.

        Raises:
            CollectiveError: another rank does not make it.
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
            state: what ``state_dict`` gave; on CPUs, that of a job on GPUs too.

        Raises:
            AutotpError: it is something else.
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
