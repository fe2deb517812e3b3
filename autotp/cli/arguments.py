"""Parsing of the commands' options: models by reference, meshes, amounts of memory; and progress messages."""

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
    """For a shell's completion: those of ``known`` that begin with what was typed."""
    return lambda incomplete: [name for name in known if name.startswith(incomplete)]


# Options that several commands have.
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
    """An option that names a file to write; that it can be written is checked before the work.

    Args:
        text: its help.
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
    """Refuses an option of the report where there is none."""
    if timeline is not None and html is None:
        raise AutotpError("--timeline and --no-timeline are for the report: give --html FILE too")


Everything = Annotated[bool, typer.Option("--all", help="Show the cheap operators too.")]


_SAID = 2000  # characters of what a user's exception says


class ModelSpecError(AutotpError):
    """The target of ``--model`` cannot be found, fails, or does not return a model."""


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
    except Exception as error:  # of a class of the user's
        raise ModelSpecError(f"--model {shown(spec)}: what {called} returns raised {described(error)}") from error


@contextmanager
def _as_it_was(spec: str, what: str) -> Iterator[None]:
    """Around code of the user's: standard streams, and the directory that relative paths begin at, are then as before."""
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
    """The factory with a name, as given to ``--model``.

    Args:
        spec: ``FILE.py:FACTORY`` or ``package.module:factory``; the directory of the file, or the current
            one, is searched for what it imports. Or a Hugging Face ``config.json``, as `autotp.cli.huggingface.configured`
            takes it, with its options behind a colon: ``config.json:batch=16,dtype=bfloat16``.

    Raises:
        ModelSpecError: The text, the file or the function is not there; says which.
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
    except (Exception, SystemExit) as error:  # modules may import what they have when it is asked for
        raise ModelSpecError(f"--model {shown(spec)}: {attribute[:80]} raised {described(error)}") from error
    if not callable(factory):
        # What a module puts into sys.modules in its own place is whatever it likes.
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
            # Dataclasses and pickling look a class's module up by its name while it is being made.
            sys.modules.setdefault(path.stem, module)
            source.loader.exec_module(module)
            return module
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # the module may end the process, or have exceptions of its own
            raise ModelSpecError(f"--model {shown(spec)}: importing {shown(where)} raised {described(error)}") from error


def _here() -> str:
    try:
        return os.getcwd()
    except OSError:
        raise ModelSpecError("--model: the directory that this runs in is gone; change to another") from None


def described(error: BaseException) -> str:
    """An error of the user's own code, and where in that code it happened."""
    # The innermost frame is where the user has to look, unless it is a library's.
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
    """For shell completion: presets, and TOML files."""
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
    """Writes a plan to the file that ``--save`` gives, if any."""
    if path is not None:
        try:
            plan.save(path)
        except OSError as error:
            raise AutotpError(f"--save {path}: cannot write the plan ({error.strerror})") from error


@contextmanager
def working(what: str) -> Iterator[None]:
    """Shows the current activity on stderr, if it is a terminal."""
    # On stderr, and nothing at all where stderr is no terminal: stdout stays clean for pipes.
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
