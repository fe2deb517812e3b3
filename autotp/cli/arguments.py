"""Parses options of commands, such as models by reference, meshes and amounts of memory; and shows progress messages."""

from __future__ import annotations

import ctypes
import glob
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import typer
from torch import nn

from autotp.analysis.sweep import example_of, takes_devices
from autotp.cli.huggingface import configured
from autotp.cli.terminal import Terminal
from autotp.errors import AutotpError
from autotp.plans.plan import AXIS_NAMES, Plan
from costmodel import OPTIMIZERS, Topology, UnitError, parse_quantity
from costmodel.errors import shown
from costmodel.text.files import check_writable
from costmodel.text.numbers import MOST_DEVICES, figure, whole_of
from passes.capture import PRECISIONS

__all__ = [
    "AsJson",
    "Everything",
    "Html",
    "Memory",
    "Mode",
    "ModelSpecError",
    "Accumulate",
    "Optimizer",
    "Panels",
    "PlannedModel",
    "SavedPlan",
    "Timeline",
    "beginning",
    "call_factory",
    "chunks_of",
    "described",
    "find_factory",
    "load_model",
    "memory_of",
    "mesh_of",
    "native_output_on_stderr",
    "output_option",
    "save_plan",
    "topologies",
    "working",
]


def beginning(known: Iterable[str]) -> Callable[[str], list[str]]:
    """A function for shell completion: returns the names of ``known`` that begin with the typed text."""
    return lambda incomplete: [name for name in known if name.startswith(incomplete)]


# Options that several commands share.
Memory = Annotated[str | None, typer.Option(help='Memory to use on each device, such as "80 GB"; left out, all of it.')]
Mode = Annotated[str, typer.Option(help="train or inference.")]
Accumulate = Annotated[
    int,
    typer.Option(help="Micro-batches that make a step, of which the example inputs are one; gradients are reduced once."),
]
Optimizer = Annotated[
    str,
    typer.Option(help=f"The optimizer to plan for: {', '.join(OPTIMIZERS)}.", autocompletion=beginning(OPTIMIZERS)),
]
Panels = Annotated[
    int | None, typer.Option(help="Panels in which products gather their operands; left out, only if memory is short.")
]
PrecisionName = Annotated[
    str | None,
    typer.Option(
        "--precision",
        help="bf16-mixed or fp16-mixed: parameters are moved and used in 16 bits, and stored and reduced in 32; left "
        "out, dtypes stay as they are.",
        autocompletion=beginning(PRECISIONS),
    ),
]
SavedPlan = Annotated[Path, typer.Argument(help="A plan that `autotp plan --save` wrote.")]
PlannedModel = Annotated[str, typer.Option(help="FILE.py:FACTORY or package.module:factory, as it was planned.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def output_option(text: str) -> Any:
    """An option that names an output file, and that checks, before the command runs, that the file can be written.

    Args:
        text: the help of the option.
    """

    def writable(param: typer.CallbackParam, path: Path | None) -> Path | None:
        if path is not None:
            try:
                check_writable(path)
            except OSError as error:
                raise AutotpError(f"{param.opts[0]} {path}: cannot be written ({error.strerror})") from error
        return path

    return typer.Option(callback=writable, help=text)


Html = Annotated[Path | None, output_option("Write a report for the browser, one file, to FILE.")]
Timeline = Annotated[
    bool | None, typer.Option(help="Whether the report shows the schedule; left out, unless the model is very large.")
]


def check_timeline(timeline: bool | None, html: Path | None) -> None:
    """Rejects ``--timeline`` and ``--no-timeline`` if there is no report."""
    if timeline is not None and html is None:
        raise AutotpError("--timeline and --no-timeline are for the report: give --html FILE too")


Everything = Annotated[bool, typer.Option("--all", help="Show the cheap operators too.")]


_SAID = 2000  # characters shown of the message of a user's exception


class ModelSpecError(AutotpError):
    """The target of ``--model`` cannot be found, fails, or does not return a model."""


def load_model(spec: str, devices: int = 1) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any] | None]:
    """Calls the factory that ``--model`` names.

    Args:
        spec: the value of ``--model`` (see `find_factory`).
        devices: passed to a factory that has an argument of that name, which may choose its batch by it.

    Returns:
        The model, its positional example inputs, and those by keyword (None when the factory gave none).

    Raises:
        ModelSpecError: The text, the file, the factory or what it returns is wrong; says which.
    """
    return call_factory(find_factory(spec), spec, devices)


def call_factory(
    factory: Callable[..., Any], spec: str, devices: int = 1
) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any] | None]:
    """`load_model` for a factory that `find_factory` returned; ``spec`` is for error messages."""
    called = f"{name[:80]}()" if (name := spec.rpartition(":")[2]).isidentifier() else "making the model"
    with _as_it_was(spec, called):
        try:
            made = factory(devices=devices) if takes_devices(factory) else factory()
        except (AutotpError, KeyboardInterrupt):
            raise
        except BaseException as error:
            raise ModelSpecError(f"--model {shown(spec)}: {called} raised {described(error)}") from error
    try:
        return example_of(made)
    except AutotpError as error:
        raise ModelSpecError(f"--model {shown(spec)}: {error}") from error
    except Exception as error:  # raised by a class of the user's
        raise ModelSpecError(f"--model {shown(spec)}: what {called} returns raised {described(error)}") from error


@contextmanager
def _as_it_was(spec: str, what: str) -> Iterator[None]:
    """Restores ``sys.stdout``, ``sys.stderr`` and the working directory after code of the user's."""
    output, here = (sys.stdout, sys.stderr), os.open(".", getattr(os, "O_PATH", os.O_RDONLY))
    try:
        yield
    finally:
        sys.stdout, sys.stderr = output
        os.fchdir(here)
        os.close(here)
    if any(stream is not None and stream.closed for stream in output):
        raise ModelSpecError(f"--model {shown(spec)}: {what} closes the standard output, which the plan is printed on")


def find_factory(spec: str) -> Callable[..., Any]:
    """The factory that the value of ``--model`` names.

    Args:
        spec: ``FILE.py:FACTORY`` or ``package.module:factory``; the directory of the file, or the current directory, is
            put on ``sys.path``. Or a Hugging Face ``config.json`` (see `autotp.cli.huggingface.configured`), with its
            options after a colon: ``config.json:batch=16,dtype=bfloat16``.

    Raises:
        ModelSpecError: The text cannot be parsed, or the file or the function does not exist; says which.
    """
    file, _, options = spec.partition(".json")
    if os.path.isfile(f"{file}.json") or spec.endswith(".json"):
        return configured(Path(f"{file}.json"), _options_of(spec, options))
    if options.startswith(":"):
        raise ModelSpecError(f"--model {shown(spec)}: there is no file {shown(f'{file}.json')}")
    where, _, attribute = spec.rpartition(":")
    if not where or not attribute.isidentifier():
        raise ModelSpecError(
            f"--model {shown(spec)}: expected FILE.py:FACTORY or package.module:factory, "
            "such as model.py:build for a function build() in model.py, or a Hugging Face config.json"
        )
    module = _import(where, spec)
    try:
        factory = getattr(module, attribute, None)
    except (Exception, SystemExit) as error:  # the module may have a ``__getattr__``, which may import
        raise ModelSpecError(f"--model {shown(spec)}: {attribute[:80]} raised {described(error)}") from error
    if not callable(factory):
        # A module may replace itself in sys.modules by any object, which may have no __dict__.
        known = [n for n, value in getattr(module, "__dict__", {}).items() if callable(value) and not n.startswith("_")]
        raise ModelSpecError(
            f"--model {shown(spec)}: {where} has no function {shown(attribute)}; it has {', '.join(known) or 'none'}"
        )
    return factory


def _options_of(spec: str, text: str) -> dict[str, str]:
    found = {}
    for part in filter(None, text.removeprefix(":").split(",")):
        name, equals, value = part.partition("=")
        if not equals or not text.startswith(":"):
            raise ModelSpecError(f"--model {shown(spec)}: expected options such as config.json:batch=16,sequence=4096")
        if name.strip() in found:
            raise ModelSpecError(f"--model {shown(spec)}: {shown(name.strip())} is given twice")
        found[name.strip()] = value.strip()
    return found


def _import(where: str, spec: str) -> ModuleType:
    is_file = where.endswith(".py")
    if is_file and not os.path.isfile(where):
        raise ModelSpecError(f"--model {shown(spec)}: no file {where[:200]}; the path is relative to {_here()}")
    path = Path(where)
    folder = str(path.resolve().parent) if is_file else _here()
    if folder not in sys.path:
        sys.path.insert(0, folder)
    with _as_it_was(spec, f"importing {shown(where)}"):
        try:
            if not is_file:
                return importlib.import_module(where)
            source = importlib.util.spec_from_file_location(path.stem, path.resolve())
            assert source is not None and source.loader is not None, path
            module = importlib.util.module_from_spec(source)
            # Dataclasses and pickle look up the module of a class by its name while the module is still being executed.
            sys.modules.setdefault(path.stem, module)
            source.loader.exec_module(module)
            return module
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # the module may call sys.exit, or raise exceptions of its own
            raise ModelSpecError(f"--model {shown(spec)}: importing {shown(where)} raised {described(error)}") from error


def _here() -> str:
    try:
        return os.getcwd()
    except OSError:
        raise ModelSpecError("--model: the directory that this runs in is gone; change to another") from None


def described(error: BaseException) -> str:
    """An error as text: its type, its message, and the innermost line of the user's own code in its traceback."""
    # Frames of libraries are skipped: the user has to look at the innermost frame of their own code.
    frames = []
    trace = error.__traceback__
    while trace is not None:
        frames.append((trace.tb_frame.f_code.co_filename, trace.tb_lineno))
        trace = trace.tb_next
    own = [frame for frame in frames if not _is_library(frame[0])] or frames
    file, line = own[-1]
    try:
        said = str(error)[:_SAID]
    except Exception:  # noqa: BLE001 - the class is the user's
        said = "(its text cannot be made)"
    with suppress(OSError, ValueError):  # the directory may be gone, and code may have no file
        file = os.path.relpath(file)
    return f"{type(error).__name__}: {said} ({file}:{line})"


def _is_library(file: str) -> bool:
    return file == __file__ or file.startswith("<") or "site-packages" in Path(file).parts


def topologies(incomplete: str) -> list[str]:
    """For shell completion: the names of presets, TOML files and directories that begin with the typed text."""
    files = [str(path) for path in Path().glob(f"{glob.escape(incomplete)}*") if path.is_dir() or path.suffix == ".toml"]
    return beginning(Topology.preset_names())(incomplete) + sorted(files)


def mesh_of(text: str) -> tuple[int, ...]:
    """Parses ``--mesh``, such as ``2,2`` or ``2x2``."""
    what = f"--mesh {shown(text)}: a size (expected those of the mesh axes, outermost first, such as 2,2 or 2x2)"
    sizes = text.split("x" if "x" in text and "," not in text else ",")
    if len(sizes) > len(AXIS_NAMES):
        raise AutotpError(f"--mesh {shown(text)}: a mesh has at most {len(AXIS_NAMES)} axes, not {len(sizes)}")
    return tuple(whole_of(size, what, most=MOST_DEVICES) for size in sizes)


def chunks_of(text: str) -> dict[str, int]:
    """Parses ``--chunks``, such as ``batch=2,rows=2``; `Plan` checks the kinds."""
    found = {}
    for part in text.split(","):
        kind, _, count = part.partition("=")
        if kind.strip() in found:
            raise AutotpError(f"--chunks {shown(text)}: {shown(kind.strip())} is given twice")
        what = f"--chunks {shown(text)}: {shown(part)} (expected kinds and numbers, such as batch=2,rows=2)"
        found[kind.strip()] = whole_of(count, what)
    return found


def memory_of(text: str) -> float:
    """Parses ``--memory`` to bytes."""
    try:
        return figure(parse_quantity(text, "memory"), "the memory", positive=True)
    except UnitError as error:
        raise AutotpError(f"--memory: {error}") from error


def save_plan(plan: Plan, path: Path | None) -> None:
    """Writes a plan to the file that ``--save`` names, if it is given."""
    if path is not None:
        try:
            plan.save(path)
        except OSError as error:
            raise AutotpError(f"--save {path}: cannot write the plan ({error.strerror})") from error


@contextmanager
def working(what: str) -> Iterator[None]:
    """Shows the current activity on stderr, if it is a terminal."""
    # On stderr, and only if stderr is a terminal, so that stdout has nothing but the result when piped.
    with Terminal(stderr=True).status(f"{what} …"), native_output_on_stderr():
        yield


@contextmanager
def native_output_on_stderr() -> Iterator[None]:
    """Redirects the occasional output of the solver's C++ code from stdout to stderr."""
    if sys.stdout is not None:
        sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        ctypes.CDLL(None).fflush(None)
        os.dup2(kept, 1)
        os.close(kept)
