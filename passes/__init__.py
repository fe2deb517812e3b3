"""Graph to graph: capturing a model, choosing layouts, and rewriting it to run on a mesh.

`graph` and `tensors` have helpers for ``torch.fx`` and for tensors in memory, `layouts` and `strategies` define the layouts
and strategies by which passes rewrite, and `world` has the functions that a rewritten graph calls. Undocumented functions
of torch are used through `torch_internals` only.

All passes, in the order in which they run. Conditional passes state their condition in parentheses, and are skipped if it
does not hold.

Capture: a model becomes a functional graph; `passes.capture.export.capture` calls

1. `passes.capture.regions.inline_regions`: regions such as those of autocast are inlined into the graph.
2. `passes.capture.writes.functionalise`: in-place writes become new values.
3. `passes.capture.canonical.normalise`: synonymous operators are replaced by one.
4. `passes.capture.observed.apart`: outputs that may stay sharded become operators of their own.

Shard: each device's graph works on its shards; `autotp.runtime.rewrite.apply` calls

5. `passes.rules.factors.analyse`: operators get their factors, from which strategies are derived.
6. `passes.sharding.chunk.in_chunks`: chunks become an axis of the mesh, if there are any.
7. `passes.sharding.shard.shard`: operators become local, with reshards between them.
8. `passes.sharding.unroll.unroll`: each chunk gets nodes of its own (plans with chunks).
9. `passes.sharding.panel.panel`: all-gathers and their products become loops over panels (plans with panels).

Overlap: collectives run concurrently with computation; `autotp.runtime.schedules` asks `passes.overlap.pipeline` for
this, where ``halves`` calls 10 to 12, ``Halves.refined`` 13 to 15, ``Halves.overlapped`` 16 to 18, ``Overlapped.slots``
19, and ``Overlapped.modules`` 20 and 21:

10. `passes.overlap.channels_last.channels_last`: convolutions get their fastest memory format (models with convolutions).
11. `passes.overlap.trace.trace`: the forward and the backward pass are traced into one graph.
12. `passes.overlap.partition.cut`: that graph is cut into a forward and a backward graph.
13. `passes.overlap.prune.drop_zeros`: sums with zeros are removed.
14. `passes.overlap.join_products.join_products`: a sum of products becomes one product.
15. `passes.overlap.tidy.tidy`: views and copies without effect are removed.
16. `passes.overlap.bucket.merge`: small collectives are merged.
17. `passes.overlap.stage.stage`: all-reduces over several levels of the network are split by level.
18. `passes.overlap.launch.launches`: each collective becomes a launch and a wait.
19. `passes.overlap.schedule.schedule`: nodes are put in an order that hides collectives.
20. `passes.overlap.outline.outline`: computation between collectives becomes calls of regions (for compiled code).
21. `passes.overlap.inplace.inplace`: results overwrite operands that no later node reads.
"""
