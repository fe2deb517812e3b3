"""What people do with a distributed module, with autotp and FSDP2.

`rows`, `state`, `frameworks` and `mistakes` say what, `side` how.
"""
