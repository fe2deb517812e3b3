"""The command line: the commands ``plan`` and ``topology``, and those of the other modules.

Wrong input ends with ``error: ...`` on stderr and exit code 2, never with a traceback.
"""

from __future__ import annotations

import errno
import itertools
import os
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

import autotp
from autotp.cli.arguments import (
    Accumulate,
    AsJson,
    Everything,
    Html,
    Memory,
    Mode,
    Optimizer,
    Panels,
    PrecisionName,
    Timeline,
    beginning,
    check_timeline,
    chunks_of,
    described,
    load_model,
    memory_of,
    mesh_of,
    output_option,
    save_plan,
    topologies,
    working,
)
from autotp.cli.calibrate import calibrate_command
from autotp.cli.explain import explain_command
from autotp.cli.inspect_plan import diff_command, inspect_command, reprice_command
from autotp.cli.render import presets_table, show_plan, topology_table
from autotp.cli.report import write_report
from autotp.cli.sweep import sweep_command
from autotp.cli.terminal import fail, open_streams, show
from autotp.cli.trace import trace_command
from autotp.cli.validate import validate_command
from autotp.cli.verify import verify_command
from autotp.errors import AutotpError
from autotp.planner import plan_model
from autotp.plans.options import RECOMPUTE, Options
from costmodel import Topology
from costmodel.errors import shown
from passes.capture import capture

__all__ = ["app", "main"]

# click.UsageError of the copy of click inside Typer; only its subclass BadParameter is public.
_UsageError: Any = typer.BadParameter.__mro__[1]

#: Options that name a file to write.
_WRITTEN = ("--csv", "--dot", "--fit", "--html", "--output", "--plot", "--save")
#: The environment variable that requests the traceback of an unexpected error.
_TRACEBACK = "AUTOTP_TRACEBACK"

app = typer.Typer(
    help="Plan how to split an unmodified PyTorch model over a mesh of devices.",
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command line and exits: with 0 on success, 2 if the input is wrong, 3 after an unexpected error.

    Args:
        argv: The arguments after the program's name; by default, those of this process.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    open_streams()
    try:
        _require_apart(words)
        code = app(args=words or ["--help"], prog_name="autotp", standalone_mode=False)
        sys.stdout.flush()
    except AutotpError as error:
        fail(str(error))
    except _UsageError as error:
        command = error.ctx.command_path if error.ctx is not None else "autotp"
        fail(f"{error.format_message()} (see {command} --help)")
    except typer.Abort:
        code = 1
    except RecursionError as error:
        fail(f"a model or a file is nested too deeply, or in itself: {error}")
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF, errno.EPIPE):
            _fail_unexpectedly(error)
        # Otherwise, writing the rest of the buffer would fail again when the process exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if error.errno == errno.EPIPE:  # the reader closed the pipe, as head(1) does
            raise SystemExit(1) from None
        fail(f"the output cannot be written: {error.strerror}")
    except Exception as error:  # noqa: BLE001 - nobody who runs a command should have to read a traceback
        _fail_unexpectedly(error)
    raise SystemExit(code or 0)


def _require_apart(words: Sequence[str]) -> None:
    """Rejects an output file that the command also reads, such as the model's, or also writes by another option.

    Only ``reprice`` may overwrite the plan that it reads.
    """
    options: dict[str, str] = {}
    parts = [part for word in words for part in (word.split("=", 1) if word.startswith("--") else [word])]
    for option, word in itertools.pairwise(parts if parts[:1] != ["reprice"] else []):
        writes = option in _WRITTEN
        file = word if writes else word.partition(":")[0]
        if word.startswith("-") or "\0" in word or not (os.path.isfile(file) or (writes and not os.path.exists(file))):
            continue
        other = options.setdefault(os.path.realpath(file), option)
        if other != option and (writes or other in _WRITTEN):
            twice = "writes" if writes and other in _WRITTEN else "reads"
            raise AutotpError(
                f"{option if writes else other} {shown(file)}: the command {twice} this file by another option too"
            )


def _fail_unexpectedly(error: Exception) -> NoReturn:
    """Reports an error that no input should cause, and exits with code 3; raises it if `_TRACEBACK` is set."""
    if os.environ.get(_TRACEBACK):
        raise error
    fail(f"{described(error)}. This is a defect of autotp: please report it, with what {_TRACEBACK}=1 shows of it", 3)


def _show_version(wanted: bool) -> None:
    if not wanted:
        return
    try:
        version = metadata.version("autotp")
    except metadata.PackageNotFoundError:
        version = "(not installed: run from its sources)"
    print(f"autotp {version}")
    raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit."),
    ] = False,
) -> None:
    pass


@app.command("plan")
def _plan(
    model: Annotated[
        str,
        typer.Option(
            help="FILE.py:FACTORY, package.module:factory, or a Hugging Face config.json with its options, as in "
            "config.json:batch=16,sequence=4096,dtype=bfloat16. The factory takes nothing, or the number of `devices`, and "
            "returns (model, args), (model, args, kwargs) or (model, kwargs), the example inputs with the model."
        ),
    ],
    topology: Annotated[
        str, typer.Option(help="A preset's name (see `autotp topology`) or a TOML file.", autocompletion=topologies)
    ],
    devices: Annotated[int | None, typer.Option(help="How many devices; left out, as many as the topology has.")] = None,
    strategy: Annotated[
        str, typer.Option(help=f"What to search: {', '.join(autotp.FAMILIES)}.", autocompletion=beginning(autotp.FAMILIES))
    ] = str(Options.strategy),
    mesh: Annotated[str | None, typer.Option(help="Sizes of the mesh axes, outermost first, such as 2,2.")] = None,
    memory: Memory = None,
    mode: Mode = Options.mode,
    optimizer: Optimizer = Options.optimizer,
    accumulate: Accumulate = Options.accumulate,
    panels: Panels = Options.panels,
    precision: PrecisionName = None,
    chunks: Annotated[
        str | None, typer.Option(help="Chunks in which devices do their work, such as batch=2 or batch=2,rows=2.")
    ] = None,
    schedule: Annotated[
        str, typer.Option(help="How it will be run: overlap (communication hidden behind computing) or none.")
    ] = Options.schedule,
    compile: Annotated[
        bool, typer.Option(help="Whether what lies between collectives is compiled where the plan runs.")
    ] = Options.compile,
    recompute: Annotated[
        str,
        typer.Option(help="What the backward pass recomputes: auto, none, selective, full, or modules: h.0,h.1."),
    ] = str(Options.recompute),
    reshard_after_forward: Annotated[
        bool | None,
        typer.Option(help="Whether parameters are gathered again for the backward pass."),
    ] = Options.reshard_after_forward,
    gap: Annotated[
        float,
        typer.Option(help="How far from the proven bound a search for what to recompute may end, as a share of the step."),
    ] = Options.gap,
    pin: Annotated[
        list[str] | None,
        typer.Option(help="A layout that something must have, such as lm_head.weight=Shard(0)@x; may be repeated."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
    save: Annotated[Path | None, output_option("Also write the plan to this JSON file.")] = None,
    html: Html = None,
    timeline: Timeline = None,
    everything: Everything = False,
) -> None:
    """Plan a model for a machine. Needs no devices, and no memory when the model is built on meta."""
    check_timeline(timeline, html)
    machine = Topology.load(topology)
    if devices is not None:
        machine = machine.resized(devices)
    options = Options(
        strategy,
        mesh=None if mesh is None else mesh_of(mesh),
        mode=mode,
        memory=None if memory is None else memory_of(memory),
        optimizer=optimizer,
        accumulate=accumulate,
        panels=panels,
        precision=precision,
        chunks=None if chunks is None else chunks_of(chunks),
        schedule=schedule,
        compile=compile,
        constraints=pin or (),
        recompute=recompute if recompute in RECOMPUTE else recompute.split(","),
        reshard_after_forward=reshard_after_forward,
        gap=gap,
    )
    with working(f"building {model}"):
        module, args, kwargs = load_model(model, machine.devices)
    with working(f"planning for {machine.devices} devices of {machine.name}"):
        plan = plan_model(module, machine, args, kwargs, options)
    save_plan(plan, save)
    if html is not None:
        write_report(
            html, module, capture(module, args, kwargs, plan.precision, plan.outputs, plan.observe), plan, timeline, model
        )
    show_plan(plan, as_json, everything)


@app.command("topology")
def _topology(
    name: Annotated[
        str | None, typer.Argument(help="A preset's name, a TOML file, or `local`.", autocompletion=topologies)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the topologies that come with autotp, or show one."""
    if name is None:
        presets = list(map(Topology.load, Topology.preset_names()))
        show([preset.to_dict() for preset in presets], presets_table(presets), as_json)
    else:
        found = Topology.local() if name == "local" else Topology.load(name)
        show(found.to_dict(), topology_table(found), as_json)


app.command("sweep")(sweep_command)
app.command("explain")(explain_command)
app.command("calibrate")(calibrate_command)
app.command("trace")(trace_command)
app.command("verify")(verify_command)
app.command("inspect")(inspect_command)
app.command("diff")(diff_command)
app.command("reprice")(reprice_command)
app.command("validate")(validate_command)
