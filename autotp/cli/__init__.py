"""The command line: a thin layer over the library.

Input: command-line arguments. Output: text on stdout, files, and an exit code. `entry` has the commands ``plan`` and
``topology`` and registers the others: `calibrate`, `explain` (with `explain_plan`), `inspect_plan` (``inspect``, ``diff``
and ``reprice``, with `inspect_graph`), `sweep`, `trace`, `validate` and `verify`. `arguments` parses the options that they
share, `huggingface` builds models from config files, and `render`, `report` and `sweep_output` show results through
`terminal`, which never interprets text as markup.
"""

from autotp.cli.arguments import ModelSpecError, call_factory, find_factory, load_model
from autotp.cli.entry import app, main

__all__ = ["ModelSpecError", "app", "call_factory", "find_factory", "load_model", "main"]
