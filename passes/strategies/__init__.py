"""How an operator may be sharded: which factor each mesh axis serves, and the layouts that follow.

Input: an operator with its factors (`passes.rules`). Output: its strategies: the layouts that it wants, makes and
returns gradients in. `strategy` derives one of them; `space` holds all of an operator's, as arrays.

Three functions decide the layout of a gradient: `effect` that in which an operator returns it, `gradient_of` that in
which it is given to the producer, and `autotp.runtime.state._plain` gives a parameter's gradient the parameter's own.
"""
