"""A distributed module's state in files.

`sharded` prepares state for ``torch.distributed.checkpoint``, and `random_state` has that of random numbers. `load` and
`save` read and write Hugging Face directories of safetensors `files`, whose tensors they `match` with the module's
`entries`.
"""
