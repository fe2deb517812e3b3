"""Graph to graph: capturing a model, choosing layouts, and rewriting it to run on a mesh.

`graph` has what all passes use of ``torch.fx``, `layouts` and `strategies` describe what passes rewrite by, and `world`
what a rewritten graph calls. What torch does not document is used by way of `torch_internals` alone.

All passes, in the order in which they run. Conditional passes state their condition in parentheses, and are skipped
where it does not hold.

Capture: a model becomes a functional graph; `passes.capture.export.capture` calls

1. `passes.capture.regions.inline_regions`: regions such as those of autocast become part of the graph.
2. `passes.capture.writes.functionalise`: writes into tensors become values.
3. `passes.capture.canonical.normalise`: every operator gets one spelling.
4. `passes.capture.observed.apart`: outputs that may stay sharded become operators of their own.

Shard: each device's graph works on parts; `autotp.runtime.rewrite.apply` calls

5. `passes.rules.factors.analyse`: operators get their factors, from which strategies are made.
6. `passes.sharding.chunk.in_chunks`: chunks become an axis of the mesh, if there are any.
7. `passes.sharding.shard.shard`: operators become local, with reshards between them.
8. `passes.sharding.unroll.unroll`: each chunk gets nodes of its own (plans with chunks).
9. `passes.sharding.panel.panel`: gathers become loops over panels (plans with panels).

Overlap: collectives run while something is computed; `autotp.runtime.schedules` asks `passes.overlap.pipeline` for
this, where ``halves`` calls 10 to 12, ``Halves.refined`` 13 to 15, ``Halves.overlapped`` 16 to 18, ``Overlapped.slots``
19, and ``Overlapped.modules`` 20 and 21:

10. `passes.overlap.channels_last.channels_last`: convolutions get the memory format that they read best (models with any).
11. `passes.overlap.trace.trace`: the forward and the backward pass become one graph.
12. `passes.overlap.partition.cut`: that graph is cut in two.
13. `passes.overlap.prune.drop_zeros`: sums of zeros are left out.
14. `passes.overlap.join_products.join_products`: a sum of products becomes one product.
15. `passes.overlap.tidy.tidy`: views and copies that change nothing are left out.
16. `passes.overlap.bucket.merge`: small collectives become one.
17. `passes.overlap.stage.stage`: all-reduces over several levels of the network go level by level.
18. `passes.overlap.launch.launches`: each collective becomes a launch and a wait.
19. `passes.overlap.schedule.schedule`: nodes are put in an order that hides collectives.
20. `passes.overlap.outline.outline`: what is computed between collectives becomes calls of regions (what is compiled).
21. `passes.overlap.inplace.inplace`: results are written over operands that nobody reads again.
"""
