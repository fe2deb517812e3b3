"""What a process runs: a plan applied to a model.

In come a model and a plan. Out goes an ``nn.Module`` that computes the same on many devices. `parallelize` and `simulate`
are the entries: `rewrite` shards the graph, `durations` predicts its nodes, `schedules` compiles it (`compiled`),
`interpreter` runs a graph node by node, for one device or for all, and `module` holds it with its `state`, `submodule`s and
`modes`; `checkpoint`, `output_guard`, `recording`, `strides` and `disjoint` serve them.
"""
