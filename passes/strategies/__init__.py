"""How an operator may be sharded: which factor each mesh axis serves, and the layouts that follow.

In comes an operator with its factors (`passes.rules`). Out go its strategies: the layouts that it wants, makes and returns
gradients in. `strategy` derives one of them; `space` holds all of an operator's, as arrays.
"""
