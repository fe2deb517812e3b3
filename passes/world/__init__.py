"""Who takes part in a collective, and what a sharded graph calls.

Input: the parts of a tensor that a process hosts. Output: the parts after a collective, or a `pending` one. `world`
defines the interface and hosts all devices in one process; `process` is one rank of a job, and `chunked` adds chunks as
further devices. `random_ops` draws numbers that replicas agree on, by `seeds` that are the same on every device; `draws`
says what one device would draw. `ops` are the functions that graphs call, `regather` gathers parameters again for the
backward pass, and `whereabouts` notes what a process waits for.
"""
