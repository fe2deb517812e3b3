"""The papers' trends, predicted: orders, signs and optima; and docs/trends.md says what the commands print."""

import math

import pytest
import sympy
from thinned import thinned

from benchmarks import trends_mesh, trends_scaling, trends_tesseract
from benchmarks.tables import DOCS
from costmodel import collectives

#: devices -> best (q, p) and its volume over Megatron's (derived in the notes on arXiv 2305.13525).
OPTIMA = {
    4: ((4, 1), 1.00),
    8: ((4, 2), 0.857),
    16: ((8, 2), 0.667),
    32: ((8, 4), 0.516),
    64: ((16, 4), 0.381),
    256: ((32, 8), 0.204),
}
TESSERACT, SCALING = trends_tesseract.Assumed(), trends_scaling.Assumed()


@pytest.mark.parametrize("devices", thinned(OPTIMA, first=1, whole=True))
def test_tensor3d_has_the_derived_optimum_and_plans_move_what_the_closed_form_says(devices):
    found = trends_mesh.tensor3d(devices)
    for (q, p), volume in found.items():
        assert volume.planned == pytest.approx(min(volume.closed, found[p, q].closed), rel=1e-9)
    best, ratio = OPTIMA[devices]
    assert min(found, key=lambda pair: found[pair].closed) == best
    assert min(volume.planned for volume in found.values()) == found[best].planned
    assert found[best].planned / found[devices, 1].planned == pytest.approx(ratio, abs=5e-4)


def test_tensor3d_continuous_optimum():
    devices, best = trends_mesh.optimum()
    assert sympy.simplify(best - sympy.sqrt(3 * devices)) == 0
    around = [trends_mesh.closed_form(q, 64 / q) for q in (0.99 * math.sqrt(192), math.sqrt(192), 1.01 * math.sqrt(192))]
    assert around[1] < min(around[0], around[2])


@pytest.mark.exact
@pytest.mark.parametrize("name", ["flat", "tpu-v4-torus"])
def test_atp_overhead_falls_with_scale_where_devices_have_their_own_links(name):
    found = {devices: trends_mesh.atp(name, devices) for devices in (8, 16, 32)}
    best = {devices: trends_mesh.least(splits) for devices, splits in found.items()}
    assert best[8].seconds > best[16].seconds > best[32].seconds
    assert [(best[n].d1, best[n].d2) for n in found] == [OPTIMA[n][0] for n in found]
    assert found[8][0].seconds < found[32][0].seconds  # Megatron's does not decrease


@pytest.mark.exact
def test_atp_overhead_on_boxes_rises_at_their_boundary_and_falls_far_beyond():
    best = {devices: trends_mesh.least(trends_mesh.atp("dgx-a100", devices)) for devices in (8, 16, 64)}
    assert best[8].seconds < best[64].seconds < best[16].seconds


@pytest.mark.exact
def test_atp_the_interconnect_decides_the_mesh():
    winners = {name: trends_mesh.least(trends_mesh.atp(name, 16)) for name in ("flat", "dgx-a100", "pcie-a100-nvlink")}
    meshes = {name: (best.d1, best.d2, best.mesh) for name, best in winners.items()}
    assert meshes == {
        "flat": (8, 2, (2, 8)),
        "dgx-a100": (16, 1, (16,)),  # 2D would share the boxes' uplinks
        "pcie-a100-nvlink": (8, 2, (8, 2)),  # d2 inside the pairs
    }


def test_tesseract_order_and_accuracy():
    assert trends_tesseract.in_order(TESSERACT)
    for of, printed in trends_tesseract.PRINTED.items():
        forward, backward = trends_tesseract.predicted(*of, printed.batch, TESSERACT)
        within = 1e-6 if of in trends_tesseract.FITTED_TO else 0.06 if of != (4, 4) else 0.5  # runs of one differ by 0.35
        assert forward + backward == pytest.approx(printed.seconds, rel=within), of
        assert 3.0 - 1e-9 <= backward / forward < 3.6  # recomputation, then both gradients, and dB over depth
    assert trends_tesseract.headline(TESSERACT) == pytest.approx(1.45, abs=0.1)


def test_tesseract_needs_a_latency_and_depth_across_nodes():
    grid = {of: sum(trends_tesseract.layer(*of, 12, 0.0, TESSERACT)) for of in ((4, 1), (8, 1))}
    assert grid[8, 1] < grid[4, 1]
    in_order = {name: trends_tesseract.in_order(variant) for name, variant in trends_tesseract.VARIANTS.items()}
    assert [name for name, order in in_order.items() if not order] == ["depth inside a node"]


def test_fsdp_loses_what_was_fitted_steadily_and_energy_per_token_rises_by_half():
    assert trends_scaling.loss(trends_scaling.fitted(SCALING), SCALING) == pytest.approx(trends_scaling.LOSS, abs=1e-6)
    assert 1e-6 < trends_scaling.fitted(SCALING) < 20e-6
    steps = [trends_scaling.predicted(devices, 1, SCALING) for devices in trends_scaling.DEVICES]
    for before, now in zip(steps, steps[1:], strict=False):
        assert now.throughput < before.throughput
        assert now.exposed > before.exposed
        assert now.power < before.power
        assert now.energy > before.energy
    assert 1.4 < steps[-1].energy / steps[0].energy < 1.6
    assert steps[-1].device_power / steps[0].device_power == pytest.approx(0.94, abs=0.01)


@pytest.mark.parametrize("name", thinned(trends_scaling.VARIANTS, first=1, whole=True))
def test_tensor_parallelism_overtakes_fsdp_between_128_and_2048_devices(name):
    assumed = trends_scaling.VARIANTS[name]

    def throughput(devices, degree):
        return trends_scaling.predicted(devices, degree, assumed).throughput

    assert throughput(128, 1) > throughput(128, 2) > throughput(128, 4) > throughput(128, 8)
    assert throughput(2048, 4) > throughput(2048, 8) > throughput(2048, 1)
    assert throughput(2048, 2) > throughput(2048, 1)
    scales = [trends_scaling.overtakes(degree, assumed) for degree in (2, 4, 8)]
    assert None not in scales
    assert 128 < scales[0] < scales[1] < scales[2] <= 2048
    assert throughput(scales[0] - 8, 2) <= throughput(scales[0] - 8, 1)


def test_exposed_all_reduces_are_megatrons():
    for degree in (2, 4, 8):
        tensor = trends_scaling.ITEMSIZE * 4096 * degree * trends_scaling.HIDDEN
        counted = 4 * collectives.bytes_moved("all_reduce", degree, tensor)
        assert trends_scaling.all_reduced(degree, 4096) == pytest.approx(counted)


@pytest.mark.exact
def test_documented_figures_are_current():
    text = (DOCS / "trends.md").read_text()
    for section in (trends_tesseract.section, trends_scaling.section):
        assert section() in text
