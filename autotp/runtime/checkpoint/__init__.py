"""Saves and loads the state of a distributed module.

`sharded` extends ``torch.distributed.checkpoint`` to tensors whose dims are sharded block by block, and `random_state` adds
the states of torch's generators. `load` and `save` read and write Hugging Face directories of safetensors `files`, whose
tensors `match` assigns to the module's `entries`. `parts` computes the slices of a tensor that a rank holds.
"""
