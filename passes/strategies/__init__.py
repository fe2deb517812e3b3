"""The strategies of an operator: which factor each mesh axis shards, and the layouts that follow.

Input: an operator with its factors (`passes.rules`). Output: its strategies: the layouts of its operands, of its results,
and of the gradients that it returns. `strategy` derives one strategy; `space` has all strategies of an operator, as arrays.

Three functions determine the layout of a gradient: `effect`, in which an operator returns it; `gradient_of`, in which it is
passed to the producer; and `autotp.runtime.state._plain`, which gives a parameter's gradient the parameter's layout.
"""
