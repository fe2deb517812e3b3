"""Text in and out: `units` reads and writes quantities, `tables` reads TOML, and `files` writes files atomically."""
