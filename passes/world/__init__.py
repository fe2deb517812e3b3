"""Collectives on the devices of a mesh, and the functions that a sharded graph calls.

Input: the parts of a tensor that a process hosts. Output: the parts after a collective, or a `pending` collective. `world`
defines the interface, and hosts all devices in one process; `process` is one rank of a job, and `chunked` adds chunks as
further devices. `random_ops` decomposes random operators so that replicas draw equal numbers, by `seeds` that are the same
on every device; `draws` draws the numbers that a single device would draw. `ops` has the functions that graphs call,
`regather` gathers parameters again for the backward pass, and `whereabouts` records what a process waits for.
"""
