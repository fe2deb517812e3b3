"""The report for the browser: its contents, and that it works in one."""

import json
import re
import shutil

import pytest
import torch
from devices import SMALL
from models import MODELS

import autotp
from autotp.analysis.report import content, page
from autotp.analysis.trace import predicted_events, scheduled, trainable
from autotp.cli.report import write_report
from autotp.planner import plan_captured
from autotp.plans.options import Options
from passes.capture import capture

FOUR = autotp.Topology.flat(4, bandwidth=1e8, latency=1e-6, device=SMALL)
CHROMIUM = shutil.which("chromium")


@pytest.fixture(scope="module")
def planned():
    model, args, kwargs = MODELS["gpt2"]()
    captured = capture(model, args, kwargs)
    return model, captured, plan_captured(captured, FOUR, Options("tensor3d", mesh=(2, 2), schedule="overlap", chunks={}))


@pytest.fixture(scope="module")
def contents(planned):
    model, captured, plan = planned
    events = predicted_events(scheduled(captured, plan, trainable(model)))
    return content(captured, plan, events=events, title="a model")


def test_the_report_agrees_with_the_plan(planned, contents):
    _, _, plan = planned
    assert [op[0] for op in contents["operators"]] == [op.name for op in plan.operators]
    for (_, module, row, seconds, communication, reads), op in zip(contents["operators"], plan.operators, strict=True):
        assert contents["modules"][module] == op.module and contents["rows"][row]["scheme"] == op.scheme
        assert tuple(contents["rows"][row]["layouts"]) == op.layouts
        assert (seconds, communication) == (op.seconds, op.communication_seconds)
        assert all(0 <= read < len(plan.operators) for read in reads)
    named = {op[0]: op for op in contents["operators"]}
    loss = next(op for op in contents["operators"] if "cross_entropy" in contents["rows"][op[2]]["target"])
    assert loss[5], "the loss reads other operators"
    assert all(row["alternatives"] for row in contents["rows"] if row["considered"] > 1)
    assert {row["name"] for row in contents["rows"]} <= named.keys()


def test_its_costs_are_the_plans(planned, contents):
    _, _, plan = planned
    costs = contents["costs"]
    computing = sum(one["seconds"] for one in costs if one["what"] == "computing")
    assert computing == pytest.approx(sum(op.seconds - op.communication_seconds for op in plan.operators), rel=1e-9)
    moving = sum(one["seconds"] for one in costs if one["what"] != "computing")
    assert moving == pytest.approx(sum(op.communication_seconds for op in plan.operators), rel=1e-9)
    assert all(one["what"].startswith("parameters") for one in costs if one["hidden"])


@pytest.mark.slow
def test_its_timeline_is_the_schedule(planned, contents):
    model, captured, plan = planned
    slots = scheduled(captured, plan, trainable(model))
    forward, backward = (max(slot.end for slot in half) for half in slots)
    ends = [begin + seconds for _, begin, seconds, *_ in contents["timeline"]["events"]]
    assert max(ends) == pytest.approx(forward + backward, rel=1e-9)
    assert contents["timeline"]["tracks"][0] == "compute" and {"axes 0", "axes 1"} < set(contents["timeline"]["tracks"])
    assert "all_reduce" in contents["timeline"]["names"]


def test_its_memory_is_the_plans(planned, contents):
    _, _, plan = planned
    memory = contents["memory"]
    assert memory["peak"] == pytest.approx(plan.predicted.memory_bytes, rel=1e-6)
    sizes = [size for _, _, size, _ in memory["curve"]]
    assert max(sizes) == sizes[memory["worst"]] == pytest.approx(memory["peak"], rel=1e-9)
    for _, _, size, kinds in memory["curve"]:
        assert sum(kinds) == pytest.approx(size, rel=1e-9) and len(kinds) == len(memory["kinds"])
    turns = [backward for _, backward, *_ in memory["curve"]]
    assert turns == sorted(turns) and {0, 1} == set(turns)


def test_a_page_is_one_file_and_holds_any_text(contents):
    hostile = {**contents, "title": "</script><script>alert(1)</script> {{script}}"}
    text = page(hostile)
    assert not re.search(r"(src|href)=\"(?!data:)", text) and "http://www.w3.org" in text
    assert not re.search(r"https?://(?!www\.w3\.org)", text), "nothing is fetched"
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)
    assert json.loads(found[1])["title"] == hostile["title"] and text.count("<script>alert") == 0


def test_nothing_half_written_is_left(planned, tmp_path):
    model, captured, plan = planned
    with pytest.raises(autotp.AutotpError, match="no directory"):
        write_report(tmp_path / "missing" / "report.html", model, captured, plan, False, "a model")
    other, x = torch.nn.Linear(4, 4), torch.randn(4, 4)
    with pytest.raises(autotp.AutotpError, match="another model"):
        write_report(tmp_path / "report.html", other, capture(other, (x,)), plan, False, "a model")
    assert not list(tmp_path.iterdir())


@pytest.fixture
def browser():
    if CHROMIUM is None:
        pytest.skip("no chromium: install it (apt-get install chromium) to test the report in a browser")
    api = pytest.importorskip("playwright.sync_api")
    with api.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield started
        started.close()


@pytest.fixture
def opened(browser, contents, tmp_path):
    """Returns a function that opens a report in a new page; fails at the end after any error or network request."""
    errors = []

    def open_(given):
        file = tmp_path / f"report{len(list(tmp_path.iterdir()))}.html"
        file.write_text(page(given))
        tab = browser.new_page(viewport={"width": 1400, "height": 900})
        tab.on("pageerror", lambda error: errors.append(str(error)))
        tab.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
        tab.on("request", lambda request: errors.append(request.url) if not request.url.startswith("file:") else None)
        tab.goto(f"file://{file}")
        return tab

    yield open_
    assert not errors


def shown(tab):
    """The text of the visible rows of the open view."""
    return tab.eval_on_selector_all("section:not([hidden]) .list .row", "rows => rows.map(row => row.textContent)")


def test_in_a_browser(opened, planned, contents):
    tab = opened(contents)
    _, _, plan = planned
    assert tab.title() == "a model" and "x 2 × y 2" in tab.text_content("#facts")
    # the tree: collapsed, opened, folded
    assert shown(tab)[0].startswith("▾the model")
    before = len(shown(tab))
    tab.click("[data-does=expand]")
    assert len(shown(tab)) > before
    assert any("0 … 1 × 2" in row for row in shown(tab)) == (
        contents["rows"][-1]["copies"] > 1 or len(contents["rows"]) < len(plan.operators)
    )
    tab.click("[data-does=collapse]")
    assert len(shown(tab)) == before
    # the graph: a box for every part, entered by a click
    boxes = tab.locator(".graph .box")
    assert boxes.count() == before - 1
    boxes.filter(has_text="transformer").click()
    assert tab.locator(".crumbs").text_content() == "the model . transformer" and boxes.count() > 3
    # the table: search, sort, explanation
    tab.click("[data-tab=Operators]")
    tab.fill("input[type=search]", "addmm c_attn")
    wanted = [op.name for op in plan.operators if "addmm" in op.target and "c_attn" in op.module]
    assert [row.split("transformer")[0] for row in shown(tab)] == wanted
    assert f"{len(wanted)} of {len(plan.operators)} operators" in tab.text_content("section:not([hidden]) .bar")
    tab.locator("section:not([hidden]) .row").first.click()
    operator = next(op for op in plan.operators if op.name == wanted[0])
    detail = tab.text_content("#detail")
    assert operator.scheme in detail and operator.module in detail and "--pin" in detail and "Reshards around it" in detail
    tab.keyboard.press("Escape")
    assert not tab.is_visible("#detail")
    tab.fill("input[type=search]", "")
    tab.get_by_text("communicating", exact=True).last.click()
    times = tab.evaluate("() => OPERATORS.map(each => each.communication).sort((a, b) => b - a)")
    assert (
        tab.evaluate("time => seconds(time)", times[0])
        == tab.locator("section:not([hidden]) .row").first.locator(".cell").last.text_content()
    )
    # the other views
    tab.click("[data-tab=Costs]")
    assert "all_reduce" in tab.text_content("section:not([hidden])")
    tab.click("[data-tab=Memory]")
    content = tab.text_content("section:not([hidden])")
    assert tab.evaluate("() => bytes(DATA.memory.peak)") in content and "Recomputed" in content
    drawn = tab.locator("svg[data-curve=memory]")
    assert drawn.locator("polygon").count() == len(contents["memory"]["kinds"])
    drawn.hover()
    assert "pass of" in tab.text_content(".memory > .dim")
    tab.click("[data-tab=Machine]")
    assert tab.locator("section:not([hidden]) .device").count() == 4
    tab.click("[data-tab=Schedule]")
    assert "axis x" in tab.text_content("section:not([hidden])")
    whole = tab.evaluate("() => timeline.to - timeline.from")
    tab.locator("canvas").hover()
    tab.mouse.wheel(0, -300)
    tab.wait_for_function("whole => timeline.to - timeline.from < whole", arg=whole)


def test_ten_thousand_operators_in_a_browser(opened, contents):
    """Copies of the model side by side, none folded: the document contains only the visible rows."""
    copies = -(-10_000 // len(contents["operators"]))
    size, modules = len(contents["operators"]), len(contents["modules"])
    operators = [
        [f"{name}_{copy}", module + copy * modules, row, seconds, moving, [read + copy * size for read in reads]]
        for copy in range(copies)
        for name, module, row, seconds, moving, reads in contents["operators"]
    ]
    names = [f"copy{copy}.{name}".rstrip(".") for copy in range(copies) for name in contents["modules"]]
    tab = opened({**contents, "operators": operators, "modules": names})
    tab.click("[data-does=expand]")
    lines = tab.evaluate("() => document.querySelector('.list .inner').clientHeight / HEIGHT")
    assert lines > 10_000 / 2 and len(shown(tab)) < 100
    tab.evaluate("() => { document.querySelector('.list').scrollTop = 1e7; }")
    tab.wait_for_function(
        f"() => [...document.querySelectorAll('.list .row')].some(row => row.textContent.includes('_{copies - 1}'))"
    )
    tab.click("[data-tab=Operators]")
    tab.fill("input[type=search]", f"copy{copies - 1}")
    assert f"{size} of {len(operators):,} operators" in tab.text_content("section:not([hidden]) .bar")
    assert len(shown(tab)) < 100
