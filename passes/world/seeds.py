"""Seeds of the passes that draw random numbers, from the state of torch's own generator in the first process.

Therefore, ``torch.manual_seed`` determines the numbers, ``torch.get_rng_state`` saves their state, and a pass that
``torch.utils.checkpoint`` repeats draws the same numbers, since it restores the generator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from costmodel.errors import AutotpError, shown
from passes.world.draws import Draw, Stream, generator_of

__all__ = ["AsSingle", "Seeds", "ways_to_draw"]


class Seeds:
    """Makes a seed for each pass, from which each part of an operator derives its own (see `passes.world.ops.seeded`).

    Attributes:
        repeated: the seed of the pass that is being repeated; None if every pass is a new one.
        ordered: whether the drawn numbers depend on the memory order of tensors.
    """

    ordered = False

    def __init__(self) -> None:
        self.repeated: Any = None

    def require(self, draws: Sequence[Draw | None]) -> None:
        """Checks that all operators can be seeded this way."""

    def next(self, draws: Sequence[Draw | None], of_first: Callable[[Tensor], Tensor]) -> Any:
        """The seed of a new pass, or the one in `repeated`; the same on every device.

        Args:
            draws: what the pass's operators draw, in the model's order.
            of_first: returns the first process's tensor on all processes; see ``World.of_first``.
        """
        return self._new(draws, of_first) if self.repeated is None else self.repeated

    def _new(self, draws: Sequence[Draw | None], of_first: Callable[[Tensor], Tensor]) -> Any:
        return int(of_first(torch.randint(2**62, (), device="cpu")))

    @contextmanager
    def repeating(self, seed: Any) -> Iterator[None]:
        """Context in which passes repeat an earlier pass, with its seed; torch's generator does not advance."""
        before, self.repeated = self.repeated, seed
        try:
            yield
        finally:
            self.repeated = before


class AsSingle(Seeds):
    """Seeds with which a pass draws what the model would draw on one device, and leaves torch's generator in that state.

    The numbers do not depend on the order in which devices run the operators: a pass first draws everything once, in the
    model's order, to record the generator's state before each operator.

    Args:
        device: the device on which the model draws.
    """

    ordered = True

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device

    def require(self, draws: Sequence[Draw | None]) -> None:
        """See ``Seeds.require``.

        Raises:
            AutotpError: for some operators, one device's draws cannot be reproduced; the message names them.
        """
        fused = self.device.type == "cuda"  # its attention kernels draw in an order of their own
        attends = str(torch.ops.aten.scaled_dot_product_attention.default)
        unknown = [d for d in draws if d is not None and (d.method is None or (fused and d.target == attends))]
        if unknown:
            names = ", ".join(f"{draw.name} ({draw.target})" for draw in unknown)
            raise AutotpError(
                f"dropout='as-single' cannot draw what one device would for {names}: use dropout='sharded', or write the "
                "model with torch.nn's dropouts, torch.rand or torch.randn"
            )

    def _new(self, draws: Sequence[Draw | None], of_first: Callable[[Tensor], Tensor]) -> Any:
        generator = generator_of(self.device)
        generator.set_state(of_first(generator.get_state()))
        states = []
        for draw in draws:
            states.append(generator.get_state())
            if draw is not None:
                draw.whole(self.device)
        return Stream(draws, states, self.device)


def ways_to_draw(dropout: str, device: torch.device) -> Seeds:
    """The seeds for the option ``dropout`` of ``autotp.parallelize``.

    Args:
        dropout: ``sharded`` or ``as-single``.
        device: on which the model runs.

    Raises:
        AutotpError: ``dropout`` is neither.
    """
    if not isinstance(dropout, str) or dropout not in ("sharded", "as-single"):
        raise AutotpError(f"dropout={shown(dropout)} is unknown; choose 'sharded' or 'as-single'")
    return Seeds() if dropout == "sharded" else AsSingle(device)
