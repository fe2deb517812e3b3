"""Tensors that share no memory."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from autotp.runtime.compiled import Disjoint


def views(storage):
    """Views of one storage: parts as of a merged message, transposed, strided, of another dtype, or empty."""
    return st.one_of(
        st.tuples(st.integers(0, 20), st.integers(0, 12)).map(lambda at: storage[at[0] : at[0] + at[1]]),
        st.integers(0, 3).map(lambda at: storage[8 * at : 8 * at + 6].view(2, 3).t()),
        st.integers(0, 2).map(lambda at: storage[at::3]),
        st.integers(0, 30).map(lambda at: storage.view(torch.float32)[at : at + 5]),
    )


@given(st.data())
def test_what_is_owned_changes_alone(data):
    storage = torch.arange(32, dtype=torch.float64)
    asked = data.draw(st.lists(views(storage), max_size=6))
    disjoint = Disjoint()
    owned = [disjoint.own(tensor) for tensor in asked]
    for number, (tensor, found) in enumerate(zip(asked, owned, strict=True)):
        assert found.dtype == tensor.dtype and torch.equal(found, tensor)
        before = [other.clone() for other in owned]
        found.fill_(-1)
        assert all(torch.equal(o, b) for i, (o, b) in enumerate(zip(owned, before, strict=True)) if i != number)
        found.copy_(before[number])


def test_parts_of_one_message_are_not_copied():
    message = torch.randn(12)
    parts = [message[8:12], message[0:3], message[3:8].view(5, 1), torch.randn(3), message[0:0]]
    disjoint = Disjoint()
    assert all(disjoint.own(part) is part for part in parts)
    assert disjoint.own(message) is not message


def test_memory_that_was_let_go_is_not_taken_for_another():
    for _ in range(20):
        given_ = torch.randn(1000)
        disjoint = Disjoint([given_])
        assert disjoint.own(given_) is not given_
        del given_
        fresh = [torch.randn(1000) for _ in range(5)]
        assert all(disjoint.own(tensor) is tensor for tensor in fresh)
