"""Adapts other frameworks to distributed modules.

`generation` generates text with causal language models of transformers, with a cache in the module. `trainer` has
transformers' `Trainer`, `accelerator` accelerate's `Accelerator`, and `lightning` a strategy for Lightning's `Trainer`:
importing one of these three requires its framework. `training_state` saves and loads the state of optimizers for them, and
`adapters` only those parameters that peft adds to a model.
"""

from autotp.integrations.generation import WithCache, generate

__all__ = ["WithCache", "generate"]
