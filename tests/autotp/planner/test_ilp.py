from __future__ import annotations

import itertools
import math
import sys
from dataclasses import replace

import numpy as np
import pytest
from ilp_instances import brute_force, small_problem, transformer_layer

from autotp.planner.ilp import Deadline, Infeasible, Node, Problem, Pruned, Tensor, Use, eliminate, evaluate, mip, solve
from autotp.planner.ilp.dual import Dual
from autotp.planner.ilp.eliminate import eliminate_all, eliminate_some
from autotp.planner.ilp.local import improve
from autotp.planner.ilp.presolve import compact, consistent
from autotp.planner.ilp.search import Search, Settings

SEEDS = 320
CHUNK = 40


def close(found: float, expected: float) -> bool:
    return found == expected or abs(found - expected) <= 1e-9 * abs(expected)


def chain(memory_bound: float = math.inf) -> Problem:
    """a -> b, c: two layouts; b and c share the reshard when they want the same one."""
    a = Node("a", np.array([1.0, 0.0]), np.array([0.0, 4.0]))
    b = Node("b", np.array([0.0, 5.0]), np.array([1.0, 0.0]))
    c = Node("c", np.array([0.0, 5.0, 9.0]), np.zeros(3))
    cost = np.array([[3.0, 0.0], [0.5, math.inf]])
    uses = (Use(1, np.array([0, 1])), Use(2, np.array([0, 1, -1])))
    tensor = Tensor(
        "a.out", 0, np.array([0, 1]), uses, cost, np.array([[10.0, 20.0]] * 2), np.array([[7.0, 0.0], [2.0, 0.0]])
    )
    return Problem((a, b, c), (tensor,), memory_bound)


@pytest.mark.parametrize(
    ("choice", "seconds", "memory"),
    [
        ((0, 0, 0), 1 + 3, 1 + 10 + 7),  # one reshard for both
        ((0, 0, 1), 1 + 5 + 3 + 0, 1 + 10 + 20 + 7),
        ((0, 1, 2), 1 + 5 + 9, 20),  # c wants none
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
        _, least = brute_force(problem)
        for bound in [
            math.inf,
            *([least, least - 0.5, least + 2, least + 5] if math.isfinite(least) else []),
        ]:
            bounded = replace(problem, memory_bound=bound)
            best, _ = brute_force(bounded)
            if math.isinf(best):
                with pytest.raises(Infeasible) as raised:
                    solve(bounded)
                assert close(raised.value.needed_memory, least), (seed, bound)
                continue
            found = solve(bounded)
            assert found is not None
            truth = evaluate(bounded, found.choice)
            assert (truth.seconds, truth.memory) == (found.seconds, found.memory)
            assert found.memory <= bound
            assert close(found.seconds, best), (seed, bound, found, best)
            assert found.optimal and found.gap <= 1e-9 and found.bound <= found.seconds


@pytest.mark.parametrize("labels", [0, 60, 10_000])
@pytest.mark.parametrize("largest_cost", [0.0, 1.0])
def test_every_way_through_the_search_equals_enumeration(
    labels: int, largest_cost: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Without labels tried at once, small problems go through the rounds of limits too.
    monkeypatch.setattr(sys.modules["autotp.planner.ilp.search"], "_QUICK", 0)
    methods = set()
    for seed in range(400, 520):
        problem = small_problem(seed)
        best, least = brute_force(problem)
        if math.isinf(best):
            continue
        bounded = replace(problem, memory_bound=least + 1)
        best = min(
            found.seconds + largest_cost * found.temporary
            for choice in itertools.product(*(range(len(node.cost)) for node in problem.nodes))
            if (found := evaluate(problem, choice)).memory <= least + 1
        )
        # A cutoff stands in for the choice that solve() would start from.
        settings = Settings(Deadline.after(60), labels=labels, work=0, cutoff=1.5 * best + 1e-9)
        search = Search(bounded, settings, largest_cost=largest_cost)
        search.run()
        assert search.choice is not None and close(search.value, best), seed
        assert search.value >= search.bound >= best * (1 - 1e-9), seed
        methods.add(search.method)
    assert ("labels" if labels else "mip") in methods


def test_cutoff_prunes_exactly_when_nothing_is_cheaper() -> None:
    for seed in range(60):
        problem = small_problem(seed)
        best, least = brute_force(problem)
        if not 0 < best < math.inf:
            continue
        for bound in (math.inf, least + 1):
            bounded = replace(problem, memory_bound=bound)
            best, _ = brute_force(bounded)
            assert isinstance(solve(bounded, cutoff=best * 0.999), Pruned), seed
            found = solve(bounded, cutoff=best * 1.001)
            assert found is not None and close(found.seconds, best), seed


def test_mixed_integer_program_alone_equals_enumeration() -> None:
    for seed in range(1, 320, 4):
        problem = small_problem(seed)
        _, least = brute_force(problem)
        if math.isinf(least):
            continue
        bounded = replace(problem, memory_bound=least + 2)
        best, _ = brute_force(bounded)
        result = mip.run(mip.build(bounded, best), deadline=Deadline.after(10))
        assert result.finished and result.choice is not None
        # The solver's own tolerance is 1e-6 of a choice, which is what Search corrects for.
        assert evaluate(bounded, result.choice).seconds == pytest.approx(best, rel=1e-4, abs=1e-12), seed


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
    for budget in (8, 17, 18):  # the nodes take 9, 9 and 1
        assert eliminate_all(Problem(nodes, tensors), budget=budget) is None and not made
    assert eliminate_all(Problem(nodes, tensors), budget=19) is not None and len(made) == 3


@pytest.mark.parametrize(("off", "method"), [(1e-8, "duality"), (1e-5, "mip")])
def test_the_solver_is_not_asked_for_the_last_bit(off: float, method: str) -> None:
    """Three nodes that all want to differ and cannot: duality does not see that, and labels may not be made."""
    nodes = tuple(Node(name, np.ones(2), np.zeros(2)) for name in "abc")
    rows, none = np.arange(2), np.zeros((2, 2))
    tensors = tuple(
        Tensor(f"{k}{n}", k, rows, (Use(n, rows),), off * np.eye(2), none, none) for k, n in ((0, 1), (1, 2), (2, 0))
    )
    search = Search(Problem(nodes, tensors, 1.0), Settings(Deadline.after(60), labels=0))
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
        _, least = brute_force(problem)
        for bound in (math.inf, least + 2):
            bounded = replace(problem, memory_bound=bound)
            best, _ = brute_force(bounded)
            masks = [np.ones(len(node.cost), dtype=bool) for node in problem.nodes]
            if not consistent(bounded, masks):
                assert math.isinf(best)
                continue
            removed += sum(int((~mask).sum()) for mask in masks)
            reduced = compact(bounded, masks, bounded=math.isfinite(bound))
            found, _ = brute_force(reduced.problem)
            assert close(found, best), (seed, bound)
    assert removed > 100


def test_dual_never_exceeds_the_optimum() -> None:
    for seed in range(200):
        problem = small_problem(seed)
        best, least = brute_force(problem)
        if math.isinf(best):
            continue
        bounded = replace(problem, memory_bound=least + 1)
        tight, _ = brute_force(bounded)
        for price in (0.0, 1e-3, 0.1):
            dual = Dual(bounded, tight, price=price)
            last = -math.inf
            for _ in range(10):
                through = dual.sweep()
                bound = dual.bound()
                slack = 1e-12 * (abs(bound) + dual.big)
                assert last - slack <= bound <= tight + slack, (seed, price)
                last = bound
                dual.rebalance()
            # Some assignment attains the optimum, so each of its strategies may not be bounded above it.
            assert all(float(values.min()) <= tight + slack for values in through)


def test_local_search_never_gets_worse_or_leaves_the_bound() -> None:
    for seed in range(100):
        problem = small_problem(seed)
        start = tuple(0 for _ in problem.nodes)
        before = evaluate(problem, start)
        bounded = replace(problem, memory_bound=before.memory)
        after = evaluate(bounded, improve(bounded, start))
        assert after.seconds <= before.seconds and after.memory <= bounded.memory_bound


def test_transformer_layer_without_a_bound_equals_elimination() -> None:
    problem = transformer_layer((4, 2))
    found = solve(problem)
    exact = eliminate_all(problem, budget=1e9)
    assert found is not None and exact is not None and found.optimal
    assert close(found.seconds, evaluate(problem, exact).seconds)


def test_transformer_layer_to_proven_optimality() -> None:
    problem = transformer_layer((4, 2, 2))
    free = solve(problem)
    assert free is not None and free.optimal
    with pytest.raises(Infeasible) as raised:
        solve(replace(problem, memory_bound=1.0))
    least, last = raised.value.needed_memory, free.seconds
    assert 0 < least < free.memory
    for part in (0.5, 0.0):
        bound = least + part * (free.memory - least)
        found = solve(replace(problem, memory_bound=bound))
        assert found is not None and found.optimal and found.memory <= bound
        assert found.seconds >= last
        last = found.seconds


def test_time_limit_reports_an_honest_gap() -> None:
    problem = transformer_layer((4, 2, 2))
    free = solve(problem)
    assert free is not None
    bounded = replace(problem, memory_bound=0.7 * free.memory)
    exact = solve(bounded)
    assert exact is not None and exact.optimal
    try:
        found = solve(bounded, deadline=Deadline.after(0.3))
    except TimeoutError:
        return
    assert found is not None
    assert found.bound <= exact.seconds * (1 + 1e-9) and found.seconds >= exact.seconds * (1 - 1e-9)
    assert found.gap == pytest.approx((found.seconds - found.bound) / found.seconds)


def test_infeasible_says_what_is_needed() -> None:
    with pytest.raises(Infeasible, match="at least 17 are needed") as raised:
        solve(chain(memory_bound=3.0))
    assert raised.value.needed_memory == 17


def test_impossible_layouts_are_infeasible_at_any_memory() -> None:
    problem = chain()
    tensor = replace(problem.tensors[0], cost=np.full((2, 2), math.inf), uses=problem.tensors[0].uses[:1])
    with pytest.raises(Infeasible, match="impossible reshard") as raised:
        solve(replace(problem, tensors=(tensor,)))
    assert raised.value.needed_memory == math.inf


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
