"""Measures the report of a large model in a browser: python -m benchmarks.report [--write] (minutes)

Plans Llama-3 70B on 64 devices, writes the report, and opens it in headless Chromium, which has to be installed. The times
of opening, searching and collapsing are measured in the page, until the frame that shows the result. With --write,
screenshots of every view are written to docs/images/.
"""

from __future__ import annotations

import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from playwright.sync_api import Page, sync_playwright

from autotp.analysis.report import content, save_report
from autotp.analysis.trace import predicted_events, scheduled, trainable
from autotp.planner import plan_captured
from autotp.plans.options import Options
from benchmarks.planning_scale import model_of
from benchmarks.tables import DOCS, command, machine, table
from costmodel import Topology
from passes.capture import capture

NAME, LAYERS, BATCH, DEVICES, MACHINE = "Llama-3 70B", 80, 64, 64, "h200"
TIMES = 5
VIEWS = ("Graph", "Operators", "Costs", "Memory", "Schedule", "Machine")
#: JavaScript that runs an action and returns the milliseconds until a frame with its result was shown.
SHOWN = """action => new Promise(done => {
  const begin = performance.now();
  new Function(action)();
  requestAnimationFrame(() => setTimeout(() => done(performance.now() - begin)));
})"""
SEARCH = """const field = document.querySelector("input[type=search]");
field.value = "%s"; field.dispatchEvent(new Event("input"));"""
CLICK = """document.querySelector("%s").click();"""


def report_of(path: Path) -> list[list[str]]:
    """Writes the report; returns table rows with the steps and their times."""
    rows = []

    def timed(what: str, action: Any) -> Any:
        begin = time.monotonic()
        result = action()
        rows.append([what, f"{time.monotonic() - begin:.1f} s"])
        print(*rows[-1], file=sys.stderr)
        return result

    module, args = model_of(NAME, LAYERS, BATCH)
    captured = timed("capture", lambda: capture(module, args))
    topology = Topology.load(MACHINE).resized(DEVICES)
    plan = timed("planning", lambda: plan_captured(captured, topology, Options("auto", schedule="overlap")))
    events = timed("scheduling", lambda: predicted_events(scheduled(captured, plan, trainable(module))))
    title = f"{NAME} on {DEVICES} devices"
    contents = timed("explaining every operator", lambda: content(captured, plan, events=events, title=title))
    save_report(path, contents)
    rows.append(
        [
            "the file",
            f"{path.stat().st_size / 1e6:.1f} MB, {len(contents['operators']):,} operators, {len(events):,} events",
        ]
    )
    return rows


def opened(tab: Page, path: Path) -> float:
    """Opens the file; returns the milliseconds until the first frame with the graph."""
    tab.goto("about:blank")
    tab.goto(f"file://{path}")
    tab.wait_for_selector(".graph .box")
    return float(tab.evaluate("() => new Promise(done => requestAnimationFrame(() => done(performance.now())))"))


def measured(tab: Page, path: Path) -> list[list[str]]:
    """Table rows with the median and the largest time of each action in the browser, in milliseconds."""
    found: dict[str, list[float]] = {}

    def note(what: str, milliseconds: float) -> None:
        found.setdefault(what, []).append(milliseconds)

    for _ in range(TIMES):
        note("open", opened(tab, path))
        tab.click("input[type=checkbox]")
        note("expand all, unfolded", tab.evaluate(SHOWN, CLICK % "[data-does=expand]"))
        note("collapse all", tab.evaluate(SHOWN, CLICK % "[data-does=collapse]"))
        tab.click("[data-tab=Operators]")
        for word in ("mlp", "layers.79", "no such thing", ""):
            note("search", tab.evaluate(SHOWN, SEARCH % word))
        note("explain an operator", tab.evaluate(SHOWN, CLICK % "section:not([hidden]) .row"))
        note("show the schedule", tab.evaluate(SHOWN, CLICK % "[data-tab=Schedule]"))
    return [[what, f"{statistics.median(each):.0f}", f"{max(each):.0f}"] for what, each in found.items()]


def pictures(tab: Page, path: Path, folder: Path) -> None:
    """Writes a screenshot of every view to a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    opened(tab, path)
    for view in VIEWS:
        tab.click(f"[data-tab={view}]")
        if view == "Graph":
            # Open one of the layers, through the modules around it.
            for name in ("model", "model", "layers", " × "):
                box = tab.locator(".graph .box", has_text=name)
                if box.count():
                    box.first.click()
        if view == "Operators":
            tab.fill("input[type=search]", "down_proj")
            tab.locator("section:not([hidden]) .row").first.click()
        if view == "Schedule":
            tab.get_by_role("button", name="backward").click()
            tab.evaluate("() => timeline.window(timeline.turn, timeline.turn + timeline.end / 100)")
        tab.wait_for_timeout(200)
        tab.screenshot(path=folder / f"report-{view.lower()}.png")
        tab.keyboard.press("Escape")


def make() -> str:
    """Measures the report of Llama-3 70B on 64 devices in a browser."""
    chromium = shutil.which("chromium")
    if chromium is None:
        raise SystemExit("error: chromium is not installed (apt-get install chromium)")
    with tempfile.TemporaryDirectory() as scratch, sync_playwright() as playwright:
        path = Path(scratch) / "report.html"
        rows = report_of(path)
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        tab = browser.new_page(viewport={"width": 1440, "height": 900})
        times = measured(tab, path)
        if "--write" in sys.argv:
            pictures(tab, path, DOCS / "images")
        version = browser.version
        browser.close()
    views = "\n\n".join(f"![{view}](images/report-{view.lower()}.png)" for view in VIEWS)
    return f"""# The report

Generated by `python -m benchmarks.report --write` on {machine()}, headless Chromium {version}.

`autotp plan … --html report.html` and `autotp inspect plan.json … --html report.html` write a single file that works
offline. It shows the model's modules as a tree and as a graph, colored by layout; all operators in a table that can be
searched and sorted, and for each of them, on a click, why it is sharded the way it is; the distribution of the step time;
what a device's memory holds along a step, and what each recomputation saves and costs; the schedule; and the mesh on the
machine. `--no-timeline` omits the schedule, which takes longest to generate.

{NAME} ({LAYERS} layers, {BATCH} sequences of 2,048) on {DEVICES} devices of `{MACHINE}`:

{table(["step", "takes"], rows)}
In the browser, milliseconds until the frame that shows the result, in {TIMES} repetitions:

{table(["action", "median", "largest"], times)}
{views}
"""


if __name__ == "__main__":
    command("report", "report.md", make)
