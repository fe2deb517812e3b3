from __future__ import annotations

import math
import sys
from dataclasses import replace

import numpy as np
import pytest
from ilp_instances import brute_force, small_problem, transformer_layer
from thinned import thinned

from autotp.planner.ilp import (
    Deadline,
    Infeasible,
    Node,
    Problem,
    Pruned,
    Solution,
    Tensor,
    Use,
    eliminate,
    evaluate,
    mip,
    solve,
)
from autotp.planner.ilp.dual import Dual
from autotp.planner.ilp.eliminate import eliminate_all, eliminate_some
from autotp.planner.ilp.local import improve
from autotp.planner.ilp.presolve import compact, consistent
from autotp.planner.ilp.problem import classes
from autotp.planner.ilp.search import Search, Settings

SEEDS = 320
CHUNK = 40


def close(found: float, expected: float) -> bool:
    return found == expected or abs(found - expected) <= 1e-9 * abs(expected)


def chain() -> Problem:
    """a -> b, c, with two layouts; b and c share a reshard if they want the same layout."""
    a = Node("a", np.array([1.0, 0.0]), np.array([0.0, 4.0]))
    b = Node("b", np.array([0.0, 5.0]), np.array([1.0, 0.0]))
    c = Node("c", np.array([0.0, 5.0, 9.0]), np.zeros(3))
    cost = np.array([[3.0, 0.0], [0.5, math.inf]])
    uses = (Use(1, np.array([0, 1])), Use(2, np.array([0, 1, -1])))
    tensor = Tensor(
        "a.out", 0, np.array([0, 1]), uses, cost, np.array([[10.0, 20.0]] * 2), np.array([[7.0, 0.0], [2.0, 0.0]])
    )
    return Problem((a, b, c), (tensor,))


@pytest.mark.parametrize(
    ("choice", "seconds", "memory"),
    [
        ((0, 0, 0), 1 + 3, 1 + 10 + 7),  # b and c share one reshard
        ((0, 0, 1), 1 + 5 + 3 + 0, 1 + 10 + 20 + 7),
        ((0, 1, 2), 1 + 5 + 9, 20),  # c wants no layout
        ((1, 0, 2), 9 + 0.5, 4 + 1 + 10 + 2),
        ((1, 1, 0), math.inf, 4 + 10 + 20 + 2),
    ],
)
def test_evaluate_counts_each_wanted_layout_once(choice: tuple[int, ...], seconds: float, memory: float) -> None:
    found = evaluate(chain(), choice)
    assert (found.seconds, found.memory) == (seconds, memory)


def test_evaluate_takes_the_largest_temporary_of_all_tensors() -> None:
    problem = chain()
    node = Node("d", np.zeros(1), np.zeros(1))
    own = Tensor(
        "d.out",
        3,
        np.zeros(1, int),
        (Use(3, np.zeros(1, int)),),
        np.ones((1, 1)),
        np.zeros((1, 1)),
        np.full((1, 1), 9.0),
    )
    problem = Problem((*problem.nodes, node), (*problem.tensors, own))
    assert evaluate(problem, (0, 0, 0, 0)).memory == 1 + 10 + 9


@pytest.mark.parametrize("first", range(0, SEEDS, CHUNK))
def test_solve_equals_enumeration(first: int) -> None:
    for seed in range(first, first + CHUNK):
        problem = small_problem(seed)
        best, _ = brute_force(problem)
        if math.isinf(best):
            with pytest.raises(Infeasible):
                solve(problem)
            continue
        found = solve(problem)
        assert isinstance(found, Solution)
        truth = evaluate(problem, found.choice)
        assert (truth.seconds, truth.memory) == (found.seconds, found.memory)
        assert close(found.seconds, best), (seed, found, best)
        assert found.optimal and found.gap <= 1e-9 and found.bound <= found.seconds


@pytest.mark.parametrize("labels", thinned([60, 0, 10_000], first=1, slow=2, whole=True))
@pytest.mark.parametrize("work", [0, 1e6])
def test_every_way_through_the_search_equals_enumeration(labels: int, work: float, monkeypatch: pytest.MonkeyPatch) -> None:
    # Without the first attempt at labels, small problems also go through the rounds of limits.
    monkeypatch.setattr(sys.modules["autotp.planner.ilp.search"], "_QUICK", 0)
    methods = set()
    for seed in range(400, 520):
        problem = small_problem(seed)
        best, _ = brute_force(problem)
        if math.isinf(best):
            continue
        # The cutoff stands in for the cost of a known choice.
        settings = Settings(Deadline.after(60), labels=labels, work=work, cutoff=1.5 * best + 1e-9)
        search = Search(problem, settings)
        search.run()
        assert search.choice is not None and close(search.value, best), seed
        assert search.value >= search.bound >= best * (1 - 1e-7), seed
        methods.add(search.method)
    assert ("labels" if labels else "elimination" if work else "mip") in methods


def test_cutoff_prunes_exactly_when_nothing_is_cheaper() -> None:
    for seed in range(60):
        problem = small_problem(seed)
        best, _ = brute_force(problem)
        if not 0 < best < math.inf:
            continue
        pruned = solve(problem, cutoff=best * 0.999)
        assert isinstance(pruned, Pruned) and pruned.bound >= best * 0.999 * (1 - 1e-9), seed
        found = solve(problem, cutoff=best * 1.001)
        assert isinstance(found, Solution) and close(found.seconds, best), seed


def test_mixed_integer_program_alone_equals_enumeration() -> None:
    for seed in range(1, 320, 4):
        problem = small_problem(seed)
        best, _ = brute_force(problem)
        if math.isinf(best):
            continue
        result = mip.run(mip.build(problem, best), deadline=Deadline.after(10))
        assert result.finished and result.choice is not None
        # The solver's tolerance is 1e-6 of a choice; Search corrects for it.
        assert evaluate(problem, result.choice).seconds == pytest.approx(best, rel=1e-4, abs=1e-12), seed


@pytest.mark.parametrize("most", [2, 40, 10**6])
def test_classes_are_numbered_as_unique_numbers_them(most: int) -> None:
    values = np.random.default_rng(most).integers(-1, most, 64)
    for given in (values, np.maximum(values, 0), values[:1]):
        _, first, index = np.unique(given, return_index=True, return_inverse=True)
        found = classes(given)
        np.testing.assert_array_equal(found[0], index)
        np.testing.assert_array_equal(found[1], first)


def test_elimination_is_exact_and_restores_choices() -> None:
    for seed in range(300):
        problem = small_problem(seed)
        best, _ = brute_force(problem)
        if math.isinf(best):
            continue
        choice = eliminate_all(problem, budget=1e8)
        assert choice is not None and close(evaluate(problem, choice).seconds, best), seed
        core = eliminate_some(problem)
        rest = eliminate_all(core.problem, budget=1e8)
        assert rest is not None and close(evaluate(problem, core.restore(rest)).seconds, best), seed
    assert eliminate_all(small_problem(3), budget=0) is None


def test_elimination_that_is_too_much_makes_no_table(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    least = eliminate._least
    monkeypatch.setattr(eliminate, "_least", lambda *given: made.append(1) or least(*given))
    nodes = tuple(Node(name, np.arange(3.0), np.zeros(3)) for name in "abc")
    rows, none = np.arange(3), np.zeros((3, 3))
    tensors = tuple(Tensor(f"t{k}", k, rows, (Use(k + 1, rows),), np.eye(3), none, none) for k in range(2))
    for budget in (8, 17, 18):  # eliminating the nodes takes 9, 9 and 1
        assert eliminate_all(Problem(nodes, tensors), budget=budget) is None and not made
    assert eliminate_all(Problem(nodes, tensors), budget=19) is not None and len(made) == 3


def test_elimination_whose_work_is_too_large_for_a_float():
    """All uses of one tensor share its reshards: a table over 700 of them would have 3**700 entries."""
    nodes = tuple(Node(f"n{k}", np.arange(3.0), np.zeros(3)) for k in range(700))
    rows, none = np.arange(3), np.zeros((3, 3))
    tensor = Tensor("t", 0, rows, tuple(Use(k, rows) for k in range(1, 700)), 1 - np.eye(3), none, none)
    assert eliminate_all(Problem(nodes, (tensor,)), budget=3e5) is None


@pytest.mark.parametrize(("off", "method"), [(1e-8, "duality"), (1e-5, "mip")])
def test_the_solver_is_not_asked_for_the_last_bit(off: float, method: str) -> None:
    """Three nodes with two strategies, of which each pair should differ: the dual bound is not tight; labels are off."""
    nodes = tuple(Node(name, np.ones(2), np.zeros(2)) for name in "abc")
    rows, none = np.arange(2), np.zeros((2, 2))
    tensors = tuple(
        Tensor(f"{k}{n}", k, rows, (Use(n, rows),), off * np.eye(2), none, none) for k, n in ((0, 1), (1, 2), (2, 0))
    )
    search = Search(Problem(nodes, tensors), Settings(Deadline.after(60), labels=0, work=0))
    search.run()
    assert search.method == method and search.value == pytest.approx(3 + off, rel=1e-12)
    assert 3 - 1e-9 <= search.bound <= search.value and search.value - search.bound <= 1e-7 * search.value


def test_elimination_leaves_nothing_of_a_chain() -> None:
    rng = np.random.default_rng(0)
    nodes = tuple(Node(f"n{k}", rng.random(9), np.zeros(9)) for k in range(12))
    tensors = tuple(
        Tensor(
            f"t{k}",
            k,
            np.arange(9),
            (Use(k + 1, np.arange(9)),),
            rng.random((9, 9)),
            np.zeros((9, 9)),
            np.zeros((9, 9)),
        )
        for k in range(11)
    )
    assert len(eliminate_some(Problem(nodes, tensors)).problem.nodes) == 1


def test_presolve_keeps_an_optimum_and_removes_strategies() -> None:
    removed = 0
    for seed in range(200):
        problem = small_problem(seed)
        best, least = brute_force(problem)
        masks = [np.ones(len(node.cost), dtype=bool) for node in problem.nodes]
        if not consistent(problem, masks):
            assert math.isinf(best)
            continue
        removed += sum(int((~mask).sum()) for mask in masks)
        for sized in (False, True):
            found, memory = brute_force(compact(problem, masks, sized=sized).problem)
            assert close(found, best) and (not sized or close(memory, least)), seed
    assert removed > 50


def test_dual_never_exceeds_the_optimum() -> None:
    for seed in range(200):
        problem = small_problem(seed)
        best, _ = brute_force(problem)
        if math.isinf(best):
            continue
        dual = Dual(problem, best)
        last = -math.inf
        for _ in range(10):
            bound, through = dual.sweep()
            assert bound == pytest.approx(dual.bound(), rel=1e-12)
            slack = 1e-12 * (abs(bound) + dual.big)
            assert last - slack <= bound <= best + slack, seed
            last = bound
            dual.rebalance()
        # Some assignment attains the optimum, so every node has a strategy whose bound does not exceed it.
        assert all(float(values.min()) <= best + slack for values in through)


def test_local_search_never_gets_worse() -> None:
    better = 0
    for seed in range(100):
        problem = small_problem(seed)
        start = tuple(0 for _ in problem.nodes)
        before, after = evaluate(problem, start).seconds, evaluate(problem, improve(problem, start)).seconds
        assert after <= before
        better += after < before
    assert better > 50


def test_transformer_layer_without_a_bound_equals_elimination() -> None:
    problem = transformer_layer((4, 2))
    found = solve(problem)
    exact = eliminate_all(problem, budget=1e9)
    assert found is not None and exact is not None and found.optimal
    assert close(found.seconds, evaluate(problem, exact).seconds)


def test_time_limit_reports_an_honest_gap() -> None:
    problem = transformer_layer((4, 2, 2))
    exact = solve(problem)
    assert isinstance(exact, Solution) and exact.optimal
    for seconds in (0.001, 0.02, 0.1, 0.3):
        try:
            found = solve(problem, deadline=Deadline.after(seconds))
        except TimeoutError:
            continue
        assert isinstance(found, Solution)
        assert found.bound <= exact.seconds * (1 + 1e-9) and found.seconds >= exact.seconds * (1 - 1e-9)
        assert found.gap == pytest.approx((found.seconds - found.bound) / found.seconds)


def test_impossible_layouts_are_infeasible() -> None:
    problem = chain()
    tensor = replace(problem.tensors[0], cost=np.full((2, 2), math.inf), uses=problem.tensors[0].uses[:1])
    with pytest.raises(Infeasible, match="impossible reshard"):
        solve(replace(problem, tensors=(tensor,)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: replace(t, have=np.array([0, 2])), r"'a.out': have ranges over 0..2; allowed are 0..1"),
        (lambda t: replace(t, uses=(Use(1, np.array([0, 7])),)), r"uses\[0\].want ranges"),
        (lambda t: replace(t, uses=(Use(5, np.array([0, 0])),)), r"belongs to node 5"),
        (lambda t: replace(t, cost=-t.cost), r"'a.out': cost holds NaN or -inf"),
        (lambda t: replace(t, memory=np.zeros(3)), r"'a.out': memory \(3,\)"),
        (lambda t: replace(t, have=np.array([0])), r"node 'a' has 2 strategies"),
    ],
)
def test_malformed_problems_name_the_culprit(change, message: str) -> None:  # noqa: ANN001
    problem = chain()
    with pytest.raises(ValueError, match=message):
        solve(replace(problem, tensors=(change(problem.tensors[0]),)))


def test_tables_between_the_same_nodes_are_one_whose_bound_is_closer():
    a, b = (Node(name, np.zeros(2), np.zeros(2)) for name in "ab")
    same, none = np.eye(2), np.zeros((2, 2))
    first = Tensor("a.out", 0, np.arange(2), (Use(1, np.arange(2)),), same, none, none)
    back = Tensor("b.out", 1, np.arange(2), (Use(0, np.array([1, 0])),), same, none, none)
    problem = Problem((a, b), (first, back))
    core = eliminate_some(problem, work=0.0)
    assert len(core.problem.nodes) == 2 and len(core.problem.tensors) == 1
    assert evaluate(core.problem, (0, 1)).seconds == evaluate(core.problem, (1, 1)).seconds == 1
    assert Dual(problem, 10.0).sweep()[0] == pytest.approx(0, abs=1e-9)
    assert Dual(core.problem, 10.0).sweep()[0] == pytest.approx(1, abs=1e-9)
