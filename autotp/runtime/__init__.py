"""What a process runs: a plan applied to a model.

Input: a model and a plan. Output: an ``nn.Module`` that computes the same on many devices. `parallelize` and `simulate`
are the entries: `rewrite` shards the graph, `durations` predicts its nodes, `schedules` compiles it (`compiled`),
`interpreter` runs a graph node by node, for one device or for all, and `module` holds its `state` and `submodule`s, which
`anatomy` puts together. What a call runs is one of its `programs`, made when it is first needed; `agreement` is how
processes do that alike. `inductor` compiles what lies between collectives. `accumulation` reduces the gradients of several
micro-batches once; `checkpoint`, `output_guard`, `recording` and `strides` serve the others, and `watch` notices faults of
a job.
"""
