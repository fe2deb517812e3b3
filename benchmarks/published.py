"""Compares predictions with published runs: python -m benchmarks.published [--fit] [--write] (a quarter of an hour)

Every run of benchmarks/published.toml is planned as it was run, and its predicted step is compared with the measured one.
``--fit`` instead fits the figures of every device to the runs, and prints them as in a preset.
"""

from __future__ import annotations

import argparse
import io
import math
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence

from autotp.cli.validate import SHIPPED as RUNS
from autotp.cli.validate import drawn
from autotp.errors import AutotpError
from autotp.validate import Prediction, accuracy, by_source, fit_device, parts, predicted_all, rankings, read_runs
from benchmarks.tables import command, machine, table

PICTURE = "images/published.svg"
_SPREAD = 0.1  # relative error beyond which a run is listed individually
_SCALES = (128, 512)  # numbers of devices; growth is compared for sets of runs that reach the first


def fitted(found: Sequence[Prediction]) -> str:
    """The fitted figures of every device with enough runs, as text for a preset."""
    parts = []
    for device in sorted({one.run.device for one in found}):
        mine = [one for one in found if one.run.device == device]
        try:
            fit = fit_device(mine)
        except AutotpError as error:
            parts.append(f"# {device}: {error}\n")
            continue
        slow = ", ".join(f"{kind} = {factor:g}" for kind, factor in fit.device.slowdown.items() if factor != 1)
        held = "" if fit.held_out is None else f", held out {fit.held_out.mean:.1%} of {fit.held_out.runs}"
        parts.append(
            f"# {device}: mean error {fit.fitted.mean:.1%} of {fit.fitted.runs} runs{held}\n"
            f"efficiency = {fit.device.efficiency:g}\nhalf_size = {fit.device.half_size:g}\nslowdown = {{ {slow} }}\n"
            f'host = "{1e6 * fit.device.host:.3g} us"\n'
        )
    return "\n".join(parts)


def report(fit: bool, write: bool) -> str | tuple[str, Mapping[str, str]]:
    """The text of the page and its picture, or the fitted figures."""
    runs, skipped = read_runs(RUNS)
    found, unplanned = predicted_all(runs)
    skipped += unplanned
    if fit:
        return fitted(found)
    text = _HEAD.format(machine=machine(), runs=len(found), skipped=len(skipped))
    rows = [[*key, *_figures(group)] for key, group in by_source(found).items()]
    text += table(_COLUMNS, [*rows, ["**all**", "", *_figures(found)]])
    text += f"\n![Predicted over measured seconds]({PICTURE})\n"
    text += f"\n## Fitted and held out\n\n{_HELD}\n" + table(*_held_out(found))
    text += f"\n## Order\n\n{_ORDER}\n" + table(*_orders(found))
    text += f"\n## Scale\n\n{_SCALE}\n" + table(*_growth(found))
    far = sorted((one for one in found if abs(one.ratio - 1) > _SPREAD), key=lambda one: -abs(math.log(one.ratio)))
    text += f"\n## Runs that are further off\n\n{_FAR}\n"
    text += table(["run", "measured s", "predicted s", "ratio"], [_row(one) for one in far]) + f"\n{_REACH}"
    text += f"\n## Runs that were not planned\n\n{_SKIPPED}\n"
    text += table(["run", "why"], [[one.name, one.why.split(";")[0]] for one in skipped])
    return text, {PICTURE: _picture(found)}


def _figures(group: Sequence[Prediction]) -> list[str]:
    found = accuracy([one.ratio for one in group])
    memory = [abs(one.memory_ratio - 1) for one in group if one.memory_ratio is not None]
    return [
        str(found.runs),
        f"{found.mean:.1%}",
        f"{found.largest:.1%}",
        f"{found.bias:.3f}",
        f"{sum(memory) / len(memory):.1%} of {len(memory)}" if memory else "–",
    ]


def _row(one: Prediction) -> list[str]:
    return [one.run.name, f"{one.run.seconds:.4g}", f"{one.seconds:.4g}", f"{one.ratio:.3f}"]


def _held_out(found: Sequence[Prediction]) -> tuple[list[str], list[list[str]]]:
    """A table of the errors of fitted and of held-out runs, per device."""
    rows = []
    for device in dict.fromkeys(one.run.device for one in found):
        both = parts([one for one in found if one.run.device == device])
        shown = [_figures(part)[:3] if part else ["0", "–", "–"] for part in both]
        rows.append([device, *shown[0], *shown[1]])
    return ["device", "fitted", "mean error", "largest", "held out", "mean error", "largest"], rows


def _orders(found: Sequence[Prediction]) -> tuple[list[str], list[list[str]]]:
    rows = []
    for one in rankings(found):
        same = "yes" if one.fastest is one.predicted else f"no: {one.predicted.name}"
        rows.append([one.predictions[0].run.name, str(len(one.predictions)), f"{one.tau:.2f}", same])
    return ["first run", "runs", "Kendall's tau", "same fastest"], rows


def _growth(found: Sequence[Prediction]) -> tuple[list[str], list[list[str]]]:
    """A table of the growth of the step time, for runs that differ only in their number of devices."""
    groups: dict[object, dict[int, Prediction]] = defaultdict(dict)
    for one in found:
        run = one.run
        key = run.source, run.model, run.sequence, run.device, run.batch, run.accumulate, run.tensor, run.recompute
        groups[key][run.topology.devices] = one
    rows = []
    for group in groups.values():
        few, *_, many = sorted(group) if len(group) > 1 else (0, 0)
        if not few or many < _SCALES[0]:
            continue
        measured, told = (
            group[many].run.seconds / group[few].run.seconds,
            group[many].seconds / group[few].seconds,
        )
        rows.append([group[few].run.name, str(few), str(many), f"{measured - 1:+.1%}", f"{told - 1:+.1%}"])
    return ["run", "devices", "to", "measured", "predicted"], rows


def _picture(found: Sequence[Prediction]) -> str:
    picture = io.StringIO()
    drawn(found).savefig(picture, format="svg", metadata={"Date": None})
    return picture.getvalue()


_COLUMNS = ["source", "device", "runs", "mean error", "largest", "predicted / measured", "memory: mean error"]

_HEAD = """# Published training runs

Generated by `python -m benchmarks.published --write` on {machine}.

`benchmarks/published.toml` has measured training runs with their settings and sources. {runs} of them are planned here as
they were run, with their degrees, micro-batches, precision and recomputation, on the presets of their machines;
{skipped} are [skipped](#runs-that-were-not-planned). The presets' efficiency, half size and slowdowns are fitted to three
quarters of each device's runs: of A100s with 80 GB to all sources together, with the host's time for a kernel, which
vTrain's and Megatron-LM's runs tell, and with an overhead of a collective by which their order is right; of H100s and of
A100s with 40 GB to MosaicML's; of H100s with 96 GB the efficiency alone, to all four; of V100s to DLPerf's on one box.
`autotp validate` prints the same for a table of your own, and `autotp validate --fit` fits a device to it. The plot shows
all runs.

Megatron-LM's runs in float16 have weights in float16 with float32 copies in the optimizer, reduce gradients once a step,
all of them together, and overlap nothing. vTrain's runs in one node recompute nothing: its own simulator recomputes nothing
in the last stage of a pipeline, which is the only one there, and with recomputation they would reach 203 TFLOP/s a device.
MosaicML's training metrics work out the cross entropy in float32.

"""

_HELD = "Of each device's runs, in the table's order, every fourth is held out of its fit:\n"

_REACH = """What is known of them:

- `dlperf-megatron-MP_1x16` and `MP_1x32`: tensor parallelism over one InfiniBand adapter of 100 Gbit/s. The same ring
  carries 10 GB/s in DLPerf's data-parallel runs, and 6 to 8 GB/s here.
- `mpt-1b-a10040-32g`: measured 1.32 s, where 64 and 128 devices take 1.08 and 1.10 s for as much work each.
- `thunder-*`: one sample of a step each, most without the optimizer; `ddp-eager` takes 27 % longer than one device alone,
  which gradients on NVLink do not explain. thunder's kernels are not Inductor's.
- `fms-llama2-7b`: compiled, with a newer FlashAttention than the runs that the preset is fitted to.
"""

_ORDER = "Sets of runs that differ in their degrees and micro-batches alone; what was measured twice counts once:\n"
_SCALE = (
    "Runs that differ in their number of devices alone, by how much a step takes longer on the most than on the fewest:\n"
)
_FAR = "Runs whose step is predicted more than 10 % off:\n"
_SKIPPED = "Runs that plans cannot represent, or whose settings are not published:\n"


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--fit", action="store_true", help="print fitted figures instead")


if __name__ == "__main__":
    sys.exit(command("published", "published.md", report, _options))
