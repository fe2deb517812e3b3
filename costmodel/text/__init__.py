"""Reads users' text, with limits, and writes it: numbers, quantities, tables and files.

`numbers` checks whole numbers and figures, `units` reads and writes quantities, `tables` reads TOML, and `files` reads
regular files and writes files atomically.
"""
