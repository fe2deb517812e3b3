"""Turns a captured graph and a strategy per operator into a sharded graph.

Input: the graph of a `passes.capture.Captured`, strategies and layouts at rest. Output: a graph whose operators compute on
local parts, with reshards between them. `chunk` first adds an axis of chunks, `shard` rewrites operator by operator
(`emitter` emits nodes, `site` is the context of a lowering, `guards` check indices and make memory formats unambiguous),
then `unroll` gives every chunk its own nodes, or `panel` replaces gathers by loops (`panel_loop`). `uneven` finds tensors
whose parts differ in shape, and `deferral` cuts a graph where gradients wait for the last of several micro-batches.
"""
