"""What a module whose calls run programs has, whether one process hosts one of its devices or all."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from autotp.errors import AutotpError
from autotp.runtime.programs.program import Program
from autotp.runtime.programs.programs import Programs
from passes.capture import require_call
from passes.torch_internals import tree_map

__all__ = ["Programmed"]


class Programmed(nn.Module):
    """A module whose calls run `Programs`."""

    _programs: Programs
    _moded: Sequence[nn.Module]  # that stand for the model's modules, in order

    @property
    def programs(self) -> tuple[Program, ...]:
        """The programs that there are, the first plan's first; each has its ``plan``."""
        return self._programs.every

    def prepare(
        self, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None, *, mode: str | None = None
    ) -> Program:
        """Makes the program of a call ahead of time, on all processes; the call that first needs it would make it.

        Args:
            args, kwargs: of such a call; nothing is computed.
            mode: ``train``, with all modules in training and gradients, or ``inference``, in evaluation and without. Left
                out, as the module and torch's switch for gradients are now.

        Raises:
            AutotpError: an argument is wrong, or there are as many programs as there may be.
            PlanMismatchError: the processes ask for different programs.
        """
        require_call(args, kwargs)
        args, kwargs = tree_map(self._given, (args, kwargs or {}))
        key, inputs = self._programs.key(self._moded, args, kwargs, mode)
        if (whole := self._programs.joined(key, args, kwargs, inputs)) is not None:
            key, args, kwargs = whole.key, whole.args, whole.kwargs
        return self._programs.of(key, args, kwargs)

    def _given(self, leaf: Any) -> Any:
        """What a call passes, as a program takes it."""
        return leaf

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Leaves the gradients of forward passes in this context unreduced, as ``DistributedDataParallel.no_sync`` does.

        They are summed on each device, in the layouts in which operators give them, until the backward pass of a forward
        pass outside this context: that reduces the sum of all. Parameters' ``.grad`` stay as they are until then, and have
        the total after it. The last micro-batch must therefore run outside, before ``optimizer.step()``; to change
        parameters earlier is an error in the next pass. ``optimizer.zero_grad()`` does not know of sums that wait, and
        keeps them; this module's ``zero_grad()`` drops them. ``torch.autograd.grad`` sees no parameter here.
        """
        with self._programs.not_syncing():
            yield

    def __copy__(self) -> Any:
        """A module of the same parameters and buffers, as copying any module gives."""
        made: Any = object.__new__(type(self))
        made.__dict__ |= self.__dict__
        return made

    def __reduce__(self) -> Any:
        """Refuses.

        Raises:
            AutotpError: always; process groups end with the job.
        """
        raise AutotpError(
            "a distributed module belongs to a running job and cannot be pickled: save its state_dict() with "
            "torch.distributed.checkpoint, and its plan with plan.save(), and distribute the model again"
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Programmed:
        """As a module's own, which ``to``, ``half`` and others call; calls then run programs for the new dtypes.

        On another device than the graphs', calls are errors until it is moved back.
        """
        super()._apply(fn, recurse)
        self._programs.applied(self)
        return self

    def train(self, mode: bool = True) -> Programmed:
        """As the model's own, which may leave some modules as they are."""
        model = self._programs.model
        if not isinstance(model, nn.Module):  # which cannot be copied
            return super().train(mode)
        pairs = [*zip(self._moded, model.modules(), strict=True)]
        for mine, its in pairs:
            its.training = mine.training
        model.train(mode)
        for mine, its in pairs:
            mine.training = its.training
        return self

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As a module's own; gradients that wait to be reduced are dropped too."""
        for program in self._programs.waiting:
            program.accumulation.drop()
        super().zero_grad(set_to_none)
