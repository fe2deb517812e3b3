"""A distributed module's state in files.

`sharded` has ``torch.distributed.checkpoint`` hold every tensor, and `random_state` where random numbers stand. `load` and
`save` read and write Hugging Face directories of safetensors `files`, whose tensors they `match` with the module's
`entries`. `parts` says what a rank has of a tensor.
"""
