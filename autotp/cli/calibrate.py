"""``autotp calibrate``: measures the machine that torchrun started it on, and writes a topology."""

from __future__ import annotations

import datetime
import os
import platform
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import torch
import torch.distributed as dist
import typer
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from autotp.calibrate import Calibration, StepFit, calibrate, shape_of_job
from autotp.cli.render import bytes_of, time_of
from autotp.cli.terminal import Terminal, make_console
from autotp.errors import AutotpError
from autotp.runtime.agreement import join_job
from costmodel import format_quantity
from costmodel.text.files import check_writable, write_atomically
from costmodel.text.numbers import MOST_DEVICES, whole_of
from costmodel.toml_out import topology_toml

__all__ = ["calibrate_command", "calibration_table", "calibration_toml"]

_TIMEOUT = datetime.timedelta(minutes=5)
_CLEAR = 0.005  # how far from 1 a factor is shown


def calibrate_command(
    output: Annotated[Path, typer.Option(help="The topology file to write, such as cluster.toml.")],
    name: Annotated[str, typer.Option(help="The topology's name.")] = "calibrated",
    quick: Annotated[bool, typer.Option("--quick", help="Fewer and smaller sizes, less often repeated.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace the file if it is there.")] = False,
) -> None:
    """Measure this machine, under torchrun, and write its topology as a TOML file.

    torchrun --standalone --nproc-per-node 4 -m autotp calibrate --output cluster.toml
    """
    reports = True
    try:
        world = _environment("WORLD_SIZE", "1", least=1)
        reports = not 0 < _environment("RANK") < world
        shape_of_job(world, os.environ)
        _start()
        _check_output(output, force, name)
    except AutotpError:
        # A process group that still exists when the interpreter exits may abort the process.
        if dist.is_initialized():
            dist.destroy_process_group()
        # Every rank finds the same error; only one reports it.
        if not reports:
            raise typer.Exit(2) from None
        raise
    first = dist.get_rank() == 0
    with _progress(first) as progress:
        calibration = calibrate(quick=quick, name=name, progress=progress)
    if first:
        try:
            write_atomically(output, calibration_toml(calibration))
        except OSError as error:
            raise AutotpError(f"--output {output}: cannot be written ({error.strerror})") from error
        make_console().print(calibration_table(calibration))
        make_console().print(f"written to {output}", soft_wrap=True)
    dist.barrier()
    dist.destroy_process_group()


def _environment(key: str, default: str = "0", least: int = 0) -> int:
    return whole_of(os.environ.get(key, default), f"environment: {key}", least, MOST_DEVICES)


def _start() -> None:
    """Creates the process group, with NCCL if every rank of the node has a GPU, and gloo otherwise."""
    local, gpus = _environment("LOCAL_RANK"), torch.cuda.device_count() if torch.cuda.is_available() else 0
    with_gpus = gpus >= _environment("LOCAL_WORLD_SIZE", os.environ.get("WORLD_SIZE", "1"), least=1)
    if with_gpus:
        torch.cuda.set_device(local)
    join_job(
        "calibrate measures the processes of a job: start it by torchrun, such as "
        "torchrun --standalone --nproc-per-node 4 -m autotp calibrate --output cluster.toml",
        "nccl" if with_gpus else "gloo",
        timeout=_TIMEOUT,
        device_id=torch.device("cuda", local) if with_gpus else None,
    )


def _check_output(output: Path, force: bool, name: str) -> None:
    """Checks, before measuring, that the output file can be written, and may be replaced if it exists.

    Rank 0 checks, and broadcasts the result.

    Raises:
        AutotpError: the file cannot be written, or exists and ``force`` is false; the same error on every rank.
    """
    said = [_refusal(output, force, name) if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(said, src=0)
    if said[0]:
        raise AutotpError(said[0])


def _refusal(output: Path, force: bool, name: str) -> str:
    if not name.strip():
        return "--name '': give the topology a name"
    if os.path.isdir(output):
        return f"--output {output}: is a directory; name a file, such as cluster.toml"
    # Anything but a regular file, such as /dev/stdout, is written to instead of replaced.
    if os.path.isfile(output) and not force:
        return f"--output {output}: is there already; give another name, or --force to replace it"
    try:
        check_writable(output)
    except OSError as error:
        return f"--output {output}: cannot be written ({error.strerror})"
    return ""


@contextmanager
def _progress(first: bool) -> Iterator[Callable[[str], None]]:
    """Yields a function that reports a stage on rank 0's stderr: in one updated line on a terminal, else in a new line."""
    if not first:
        yield lambda stage: None
        return
    console = Terminal(stderr=True)
    if not console.is_terminal:
        yield lambda stage: print(f"measuring {stage}", file=sys.stderr, flush=True)
        return
    with console.status("measuring …") as status:
        yield lambda stage: status.update(Text(f"measuring {stage} …"))


def calibration_toml(calibration: Calibration) -> str:
    """The topology as TOML, with comments that give its origin and the errors of the fits."""
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    levels = " x ".join(f"{level.size} {level.name}" for level in reversed(calibration.topology.levels))
    header = [
        f"Measured by autotp calibrate on {now}, host {platform.node()} ({levels}), torch {torch.__version__}.",
        f"Command: autotp {shlex.join(sys.argv[1:])}",
        "Errors are of the fitted formula at the sizes measured: the median, and the largest.",
    ]
    if calibration.concurrency is not None:
        header.append(
            f"Between nodes, an all_gather takes {calibration.concurrency:.2f} times as long with all ranks of a node at "
            "once as with one."
        )
    if calibration.checks:
        header.append("Over all ranks, which was not fitted, predicted and measured:")
        header += [
            f"  {c.kind} of {bytes_of(c.volume)}: {time_of(c.predicted)}, {time_of(c.measured)} ({c.error:+.0%})"
            for c in calibration.checks
        ]
    steps = calibration.steps
    header += [
        f"All figures are those that a step reaches. {_factors(steps)}",
        "Errors of steps, without and with these factors:",
    ]
    header += [f"  {plan}: {before:+.0%}, {steps.errors[plan]:+.0%}" for plan, before in steps.before.items()]
    notes: dict[tuple[str, ...], str] = {
        ("levels", fit.level, fit.link.kind): f"error {fit.link.median_error:.1%}, at most {fit.link.largest_error:.1%}"
        for fit in calibration.fits
    }
    products = calibration.device.products
    for dtype, errors in products.errors.items():
        notes["device", "flops", dtype] = f"error {_spread(errors)}"
    for kind in calibration.device.slowdowns:
        low, high = calibration.device.spread(kind)
        notes["device", "slowdown", kind] = f"{low:.2f} to {high:.2f}"
    return topology_toml(calibration.topology, header, notes)


def calibration_table(calibration: Calibration) -> RenderableType:
    """The measured figures and the errors of the fits, as a rich renderable."""
    parts: list[RenderableType] = [_links_table(calibration)] if calibration.fits else []
    if calibration.concurrency is not None:
        parts.append(f"all ranks of a node at once take {calibration.concurrency:.2f} × as long as one between nodes")
    parts.append(_device_table(calibration))
    if calibration.checks:
        parts.append(_checks_table(calibration))
    parts += [_steps_table(calibration.steps), _factors(calibration.steps)]
    return Group(*parts)


def _links_table(calibration: Calibration) -> Table:
    table = _columns("level", "collective", "latency", "bandwidth of a ring", "sizes", "error", "at most", "outliers")
    for fit in calibration.fits:
        link = fit.link
        table.add_row(
            fit.level,
            link.kind,
            time_of(link.latency),
            format_quantity(link.bandwidth, "bandwidth"),
            f"{bytes_of(link.volumes[0])} – {bytes_of(link.volumes[-1])}",
            f"{link.median_error:.1%}",
            f"{link.largest_error:.1%}",
            f"{fit.outliers} of {fit.repetitions}",
        )
    return table


def _device_table(calibration: Calibration) -> Table:
    device, fit = calibration.topology.device, calibration.device
    table = _columns("device", "figure", "error or range")
    table.add_row("name", device.name, "")
    for dtype, rate in device.flops.items():
        error = "slow: of one small product" if dtype in fit.slow else _spread(fit.products.errors[dtype])
        table.add_row(dtype, format_quantity(rate, "rate"), error)
    if fit.left_out:
        table.add_row("does not run", ", ".join(fit.left_out), "")
    table.add_row("half size", f"{device.half_size:.3g}", "")
    table.add_row("memory", f"{bytes_of(device.memory)} at {format_quantity(device.memory_bandwidth, 'bandwidth')}", "")
    table.add_row("launch", time_of(device.launch), "")
    for level in calibration.topology.levels:
        table.add_row(f"contention: {level.name}", f"{level.contention or 0:.0%}", "")
    for kind, factor in device.slowdown.items():
        low, high = fit.spread(kind)
        table.add_row(f"slowdown: {kind}", f"{factor:.2f}", f"{low:.2f} – {high:.2f} ({', '.join(fit.slowdowns[kind])})")
    return table


def _checks_table(calibration: Calibration) -> Table:
    table = _columns("all ranks (not fitted)", "size", "predicted", "measured", "error")
    for check in calibration.checks:
        table.add_row(
            check.kind, bytes_of(check.volume), time_of(check.predicted), time_of(check.measured), f"{check.error:+.0%}"
        )
    return table


def _steps_table(steps: StepFit) -> Table:
    table = _columns("steps of a reference model", "error, parts by themselves", "error, parts in a step")
    for plan, before in steps.before.items():
        table.add_row(plan, f"{before:+.0%}", f"{steps.errors[plan]:+.0%}")
    return table


def _factors(steps: StepFit) -> str:
    """The factors of parts, without those that steps do not depend on."""
    found = ", ".join(f"{part} {factor:.2f}" for part, factor in steps.factors.items() if abs(factor - 1) >= _CLEAR)
    return f"In a step, parts take so many times as long as by themselves: {found or 'all of them as long'}."


def _columns(*titles: str) -> Table:
    table = Table(header_style="bold")
    for number, title in enumerate(titles):
        table.add_column(title, justify="left" if number == 0 else "right")
    return table


def _spread(errors: tuple[float, ...]) -> str:
    sizes = sorted(map(abs, errors))
    return f"{sizes[len(sizes) // 2]:.1%}, at most {sizes[-1]:.1%}"
