"""Applies a plan to a model, and runs the distributed module.

Input: a model and a plan. Output: an ``nn.Module`` that computes the same results on many devices. `parallelize` and
`simulate` are the entry points. `rewrite` shards the graph, `durations` predicts the seconds of its nodes, `schedules`
makes its scheduled graphs (`compiled`), and `interpreter` runs a graph node by node, for one device or for all. `module` is
the distributed module; `anatomy` builds its hierarchy of `submodule`s, which hold its `state`. Each call runs one of the
module's `programs`, made when it is first needed; `agreement` makes all processes decide alike. `inductor` compiles the
regions between collectives. `accumulation` reduces the gradients of several micro-batches once, `output_guard` handles
outputs that depend on each other, `strides` keeps values in their traced strides, `recording` measures when nodes run,
`checkpoint` saves and loads state, and `watch` detects faults of a running job.
"""
