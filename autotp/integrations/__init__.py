"""How other frameworks use a distributed module.

`generation`: causal language models of transformers generate text, with the module's own cache. `trainer`: transformers'
`Trainer`, and `accelerator`: accelerate's `Accelerator`, for which `training_state` saves optimizers, and `adapters` those
parameters alone that peft adds to a model. `lightning`: a strategy of Lightning's `Trainer`. These three need their
framework as soon as they are imported.
"""

from autotp.integrations.generation import WithCache, generate

__all__ = ["WithCache", "generate"]
