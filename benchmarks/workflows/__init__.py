"""Common workflows with a distributed module, run with autotp and with FSDP2.

`rows`, `state`, `frameworks` and `mistakes` define the workflows; `side` distributes models in either way.
"""
