"""Base class of modules whose calls run programs, whether a process hosts one of the devices or all of them."""

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
    _moded: Sequence[nn.Module]  # counterparts of the model's modules, in the order of ``model.modules()``

    @property
    def programs(self) -> tuple[Program, ...]:
        """The programs made so far, beginning with that of the first plan; each has its ``plan``."""
        return self._programs.every

    def prepare(
        self, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None, *, mode: str | None = None
    ) -> Program:
        """Makes the program of a call ahead of time; otherwise, the first call that needs it does. A collective call.

        Args:
            args, kwargs: example arguments of the call; nothing is computed.
            mode: ``train`` (all modules in training, with gradients) or ``inference`` (all modules in evaluation, without
                gradients). By default, the module's current mode and ``torch.is_grad_enabled()``.

        Raises:
            AutotpError: an argument is wrong, or the maximum number of programs is reached.
            PlanMismatchError: the processes prepare different programs.
        """
        require_call(args, kwargs)
        args, kwargs = tree_map(self._given, (args, kwargs or {}))
        key, inputs = self._programs.key(self._moded, args, kwargs, mode)
        if (whole := self._programs.joined(key, args, kwargs, inputs)) is not None:
            key, args, kwargs = whole.key, whole.args, whole.kwargs
        return self._programs.of(key, args, kwargs)

    def _given(self, leaf: Any) -> Any:
        """Converts a leaf of a call's arguments to what programs take."""
        return leaf

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Leaves the gradients of forward passes in this context unreduced, as ``DistributedDataParallel.no_sync`` does.

        They are summed on each device, in the layouts in which operators compute them, until the backward pass of a
        forward pass outside this context, which reduces the sums. Parameters' ``.grad`` do not change until then, and hold
        the total afterwards. The last micro-batch must therefore run outside, before ``optimizer.step()``; the next forward
        pass raises an error if parameters were changed earlier. ``optimizer.zero_grad()`` does not affect unreduced sums;
        this module's ``zero_grad()`` drops them. ``torch.autograd.grad`` finds no parameters for passes in this context.
        """
        with self._programs.not_syncing():
            yield

    def __copy__(self) -> Any:
        """A shallow copy with the same parameters and buffers, as ``copy.copy`` returns for any module."""
        made: Any = object.__new__(type(self))
        made.__dict__ |= self.__dict__
        return made

    def __reduce__(self) -> Any:
        """Always raises, as a distributed module cannot be pickled.

        Raises:
            AutotpError: always; process groups end with the job.
        """
        raise AutotpError(
            "a distributed module belongs to a running job and cannot be pickled: save its state_dict() with "
            "torch.distributed.checkpoint, and its plan with plan.save(), and distribute the model again"
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Programmed:
        """As `nn.Module._apply`, which ``to``, ``half`` and others call; later calls run programs for the new dtypes.

        If the module leaves the graphs' device, calls raise an error until it is moved back.
        """
        super()._apply(fn, recurse)
        self._programs.applied(self)
        return self

    def train(self, mode: bool = True) -> Programmed:
        """Sets the modes as the model's own ``train`` does, which may leave some modules unchanged."""
        model = self._programs.model
        if not isinstance(model, nn.Module):  # the model could not be copied
            return super().train(mode)
        pairs = [*zip(self._moded, model.modules(), strict=True)]
        for mine, its in pairs:
            its.training = mine.training
        model.train(mode)
        for mine, its in pairs:
            mine.training = its.training
        return self

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As `nn.Module.zero_grad`; gradients that are not reduced yet are dropped too."""
        for program in self._programs.waiting:
            program.accumulation.drop()
        super().zero_grad(set_to_none)
