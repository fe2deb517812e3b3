"""The command line: plan a model for a machine without having the machine, and look at topologies.

A mistake of the user's ends with ``error: ...`` on stderr and exit code 2, never with a traceback.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import typer
from rich.console import Console
from torch import Tensor, nn

import autotp
from autotp.cli_calibrate import calibrate_command
from autotp.cli_explain import explain_command
from autotp.cli_sweep import sweep_command
from autotp.errors import AutotpError
from autotp.render import make_console, plan_table, presets_table, topology_table
from autotp.sweep import takes_devices
from costmodel import OPTIMIZERS, Topology, TopologyError, UnitError, parse_quantity
from passes.capture import CaptureError

__all__ = ["ModelSpecError", "app", "call_factory", "find_factory", "load_model", "main"]

USER_ERRORS = (AutotpError, CaptureError, TopologyError, UnitError)

app = typer.Typer(
    help="Plan how to split an unmodified PyTorch model over a mesh of devices.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


class ModelSpecError(AutotpError):
    """What ``--model`` names cannot be found, fails, or returns no model."""


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line and exit: 0 when all went well, 2 when the input was at fault.

    Args:
        argv: Words after the program's name; left out, those of this process.
    """
    try:
        app(args=None if argv is None else list(argv), prog_name="autotp")
    except USER_ERRORS as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None


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
            help="FILE.py:FACTORY or package.module:factory. The factory takes nothing, or the number of `devices`, and "
            "returns (model, args), (model, args, kwargs) or (model, kwargs), the example inputs with the model."
        ),
    ],
    topology: Annotated[str, typer.Option(help="A preset's name (see `autotp topology`) or a TOML file.")],
    devices: Annotated[int | None, typer.Option(help="How many devices; left out, as many as the topology has.")] = None,
    strategy: Annotated[str, typer.Option(help=f"What to search: {', '.join(autotp.FAMILIES)}.")] = "auto",
    mesh: Annotated[str | None, typer.Option(help="Sizes of the mesh axes, outermost first, such as 2,2.")] = None,
    memory: Annotated[
        str | None, typer.Option(help='Memory to use on each device, such as "80 GB"; left out, all of it.')
    ] = None,
    mode: Annotated[str, typer.Option(help="train or inference.")] = "train",
    optimizer: Annotated[str, typer.Option(help=f"Whose state to count: {', '.join(OPTIMIZERS)}.")] = "adamw",
    panels: Annotated[
        int | None, typer.Option(help="Panels in which products gather their operands; left out, as memory needs.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
    save: Annotated[Path | None, typer.Option(help="Write the plan, as JSON, to this file too.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Show the cheap operators too.")] = False,
) -> None:
    """Plan a model for a machine. Needs no devices, and no memory when the model is built on meta."""
    machine = Topology.load(topology)
    if devices is not None:
        machine = machine.resized(devices)
    shape = None if mesh is None else _mesh(mesh)
    bound = None if memory is None else _memory(memory)
    with _working(f"building {model}"):
        module, args, kwargs = load_model(model, machine.devices)
    with _working(f"planning for {machine.devices} devices of {machine.name}"):
        plan = autotp.plan(
            module,
            machine,
            args,
            kwargs,
            strategy=strategy,
            mesh=shape,
            mode=mode,
            memory=bound,
            optimizer=optimizer,
            panels=panels,
        )
    if save is not None:
        try:
            plan.save(save)
        except OSError as error:
            raise AutotpError(f"--save {save}: cannot write the plan ({error.strerror})") from error
    if as_json:
        print(plan.to_json())
    else:
        make_console().print(plan_table(plan, limit=None if everything else 40))


@app.command("topology")
def _topology(
    name: Annotated[str | None, typer.Argument(help="A preset's name, a TOML file, or `local`.")] = None,
) -> None:
    """List the topologies that come with autotp, or show one."""
    if name is None:
        make_console().print(presets_table(Topology.load(preset) for preset in Topology.preset_names()))
    else:
        make_console().print(topology_table(Topology.local() if name == "local" else Topology.load(name)))


app.command("sweep")(sweep_command)
app.command("explain")(explain_command)
app.command("calibrate")(calibrate_command)


def load_model(spec: str, devices: int = 1) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any] | None]:
    """Call the factory that a text names.

    Args:
        spec: as `find_factory` takes it.
        devices: given to a factory that has an argument of that name, which may make its batch by it.

    Returns:
        The model, its positional example inputs, and those by keyword (None when the factory gave none).

    Raises:
        ModelSpecError: The text, the file, the factory or what it returns is wrong; says which.
    """
    return call_factory(find_factory(spec), spec, devices)


def call_factory(
    factory: Callable[..., Any], spec: str, devices: int = 1
) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any] | None]:
    """`load_model` for a factory that was found already; ``spec`` is for messages."""
    try:
        made = factory(devices=devices) if takes_devices(factory) else factory()
    except Exception as error:
        attribute = spec.rpartition(":")[2]
        raise ModelSpecError(f"--model {spec!r}: {attribute}() raised {_describe(error)}") from error
    return _example(made, spec)


def find_factory(spec: str) -> Callable[..., Any]:
    """The factory that a text names.

    Args:
        spec: ``FILE.py:FACTORY`` or ``package.module:factory``; the directory of the file, or the current
            one, is searched for what it imports.

    Raises:
        ModelSpecError: The text, the file or the function is not there; says which.
    """
    where, _, attribute = spec.rpartition(":")
    if not where or not attribute.isidentifier():
        raise ModelSpecError(
            f"--model {spec!r}: expected FILE.py:FACTORY or package.module:factory, "
            "such as model.py:build for a function build() in model.py"
        )
    module = _import(where, spec)
    factory = getattr(module, attribute, None)
    if not callable(factory):
        known = [name for name, value in vars(module).items() if callable(value) and not name.startswith("_")]
        raise ModelSpecError(
            f"--model {spec!r}: {where} has no function {attribute!r}; it has {', '.join(known) or 'none'}"
        )
    return factory


def _import(where: str, spec: str) -> ModuleType:
    is_file = where.endswith(".py")
    path = Path(where).resolve()
    if is_file and not path.is_file():
        raise ModelSpecError(f"--model {spec!r}: no file {where}; the path is relative to {os.getcwd()}")
    folder = str(path.parent) if is_file else os.getcwd()
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        if not is_file:
            return importlib.import_module(where)
        source = importlib.util.spec_from_file_location(path.stem, path)
        assert source is not None and source.loader is not None, path
        module = importlib.util.module_from_spec(source)
        # Dataclasses and pickling look a class's module up by its name while it is being made.
        sys.modules.setdefault(path.stem, module)
        source.loader.exec_module(module)
        return module
    except Exception as error:
        raise ModelSpecError(f"--model {spec!r}: importing {where} raised {_describe(error)}") from error


def _example(made: Any, spec: str) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any] | None]:
    parts = made if isinstance(made, tuple) else (made,)
    if not 1 <= len(parts) <= 3 or not isinstance(parts[0], nn.Module):
        raise ModelSpecError(
            f"--model {spec!r}: the factory returned {_types(made)}; "
            "expected (model, args), (model, args, kwargs) or (model, kwargs), the model an nn.Module"
        )
    args: Any = parts[1] if len(parts) > 1 else ()
    kwargs: Any = parts[2] if len(parts) > 2 else None
    if len(parts) == 2 and isinstance(args, Mapping):
        args, kwargs = (), args
    if isinstance(args, Tensor):
        args = (args,)
    if not isinstance(args, tuple | list) or not (kwargs is None or isinstance(kwargs, Mapping)):
        raise ModelSpecError(
            f"--model {spec!r}: the factory returned {_types(made)}; "
            "args must be a tuple of positional inputs and kwargs a dict from names to inputs"
        )
    return parts[0], tuple(args), None if kwargs is None else dict(kwargs)


def _types(made: Any) -> str:
    if isinstance(made, tuple):
        return f"({', '.join(type(part).__name__ for part in made)})"
    return type(made).__name__


def _describe(error: Exception) -> str:
    # The innermost frame is where the user has to look, unless it is a library's.
    frames = []
    trace = error.__traceback__
    while trace is not None:
        frames.append((trace.tb_frame.f_code.co_filename, trace.tb_lineno))
        trace = trace.tb_next
    own = [frame for frame in frames if not _is_library(frame[0])] or frames
    file, line = own[-1]
    return f"{type(error).__name__}: {error} ({os.path.relpath(file)}:{line})"


def _is_library(file: str) -> bool:
    return file == __file__ or file.startswith("<") or "site-packages" in Path(file).parts


def _mesh(text: str) -> tuple[int, ...]:
    try:
        shape = tuple(int(size) for size in text.replace("x", ",").split(","))
    except ValueError:
        shape = ()
    if not shape or min(shape) < 1:
        raise AutotpError(f"--mesh {text!r}: expected the sizes of the mesh axes, outermost first, such as 2,2")
    return shape


def _memory(text: str) -> float:
    try:
        return parse_quantity(text, "memory")
    except UnitError as error:
        raise AutotpError(f"--memory: {error}") from error


@contextmanager
def _working(what: str) -> Iterator[None]:
    # On stderr, and nothing at all where stderr is no terminal: stdout stays clean for pipes.
    with Console(stderr=True).status(f"{what} …"), _native_output_on_stderr():
        yield


@contextmanager
def _native_output_on_stderr() -> Iterator[None]:
    # The solver, in C++, now and then prints to the process's stdout.
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        ctypes.CDLL(None).fflush(None)
        os.dup2(kept, 1)
        os.close(kept)


if __name__ == "__main__":
    main()
