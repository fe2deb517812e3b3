"""How other frameworks use a distributed module.

`generation`: causal language models of transformers generate text, with the module's own cache.
"""

from autotp.integrations.generation import WithCache, generate

__all__ = ["WithCache", "generate"]
