"""Text in and out: what users give, bounded.

`numbers` checks whole numbers and figures, `units` reads and writes quantities, `tables` reads TOML, and `files` reads
regular files and writes files atomically.
"""
