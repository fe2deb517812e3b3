"""A captured graph and a strategy per operator become a sharded graph.

Input: the graph of a `passes.capture.Captured`, strategies and resting layouts. Output: a graph whose operators work on
parts, with reshards between them. `chunk` first adds an axis of chunks, `shard` rewrites operator by operator
(`emitter` writes nodes, `site` is what a lowering sees, `guards` check indices and make memory formats clear), then
`unroll` gives every chunk its own nodes, or `panel` replaces gathers by loops (`panel_loop`). `uneven` says which parts
differ in shape, and `deferral` cuts a graph where gradients wait for the last of several micro-batches.
"""
