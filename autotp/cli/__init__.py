"""The command line: a thin layer over the library.

In come command-line arguments. Out go text on stdout, files, and an exit code. `entry` has the commands `plan` and
`topology` and collects the others, one per file; `arguments` reads what they share, `huggingface` makes models of
configurations, `render` and `sweep_output` show results.
"""

from autotp.cli.arguments import ModelSpecError, call_factory, find_factory, load_model
from autotp.cli.entry import app, main

__all__ = ["ModelSpecError", "app", "call_factory", "find_factory", "load_model", "main"]
