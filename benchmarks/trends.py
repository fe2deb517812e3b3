"""What the papers report, by the cost model and the planner alone."""

from __future__ import annotations

from benchmarks import trends_mesh, trends_scaling, trends_tesseract
from benchmarks.tables import command


def make() -> str:
    """Predicts the trends that four papers report, and sets them beside their figures."""
    sections = "\n".join(
        (
            trends_mesh.tensor3d_section(),
            trends_mesh.atp_section(),
            trends_tesseract.section(),
            trends_scaling.section(),
        )
    )
    return f"""# The papers' trends, predicted

Made by `python -m benchmarks.trends --write`; the command fails where a plan's traffic differs from its closed form, or the
order of Tesseract's grids from the paper's.

Everything here is predicted by `costmodel/` and the planner; nothing was measured. Figures of the papers carry their
source: [paper] read in the paper or its authors' code, [second] read in a secondary source, [derived] follows from
the layouts. What was fitted is said.

{sections}"""


if __name__ == "__main__":
    command("trends", "trends.md", make)
