"""The seeds of the passes that draw random numbers: from torch's own generator, as it stands in the first process.

``torch.manual_seed`` sets what is drawn, ``torch.get_rng_state`` saves it, and a pass that ``torch.utils.checkpoint`` does
again, for which that restores the generator, draws the same.
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
    """A seed for each pass, from which each part of an operator has its own (see `passes.world.ops.seeded`).

    Attributes:
        repeated: the seed of the pass that is being run again; None: every pass is a new one.
        ordered: whether it matters in which order elements lie in memory.
    """

    ordered = False

    def __init__(self) -> None:
        self.repeated: Any = None

    def require(self, draws: Sequence[Draw | None]) -> None:
        """Refuses operators that it cannot seed."""

    def next(self, draws: Sequence[Draw | None], of_first: Callable[[Tensor], Tensor]) -> Any:
        """The seed of a pass that begins, the same on every device.

        Args:
            draws: what the pass's operators draw, in the model's order.
            of_first: gives the first process's tensor of those that all processes pass.
        """
        return self._new(draws, of_first) if self.repeated is None else self.repeated

    def _new(self, draws: Sequence[Draw | None], of_first: Callable[[Tensor], Tensor]) -> Any:
        return int(of_first(torch.randint(2**62, (), device="cpu")))

    @contextmanager
    def repeating(self, seed: Any) -> Iterator[None]:
        """A pass that was run before is run again, with its seed; torch's generator does not go on."""
        before, self.repeated = self.repeated, seed
        try:
            yield
        finally:
            self.repeated = before


class AsSingle(Seeds):
    """Numbers that the model itself would draw in one process, and torch's generator where that would leave it.

    In whatever order devices run the operators, each has its place in the model's: a pass first draws everything once, to
    know where the generator stands before each.

    Args:
        device: on which the model draws.
    """

    ordered = True

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device

    def require(self, draws: Sequence[Draw | None]) -> None:
        """See ``Seeds.require``.

        Raises:
            AutotpError: names the operators.
        """
        fused = self.device.type == "cuda"  # its kernels draw in an order of their own
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
    """Seeds of the kind that ``autotp.parallelize`` is asked for.

    Args:
        dropout: ``sharded`` or ``as-single``.
        device: on which the model runs.

    Raises:
        AutotpError: it is neither.
    """
    if not isinstance(dropout, str) or dropout not in ("sharded", "as-single"):
        raise AutotpError(f"dropout={shown(dropout)} is unknown; choose 'sharded' or 'as-single'")
    return Seeds() if dropout == "sharded" else AsSingle(device)
