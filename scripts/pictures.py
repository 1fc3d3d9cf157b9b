"""Make the pictures of the README and the documents: `python scripts/pictures.py` (needs Chromium for the report).

docs/images/report-light.png and report-dark.png show the profile of examples/mnist_pipeline. The drawings of schedules
(docs/images/*.svg) are made from the text that `poptorch.describe` prints.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

import poptorch
from popengine.drawing import schedule_svg

ROOT = Path(__file__).parents[1]
IMAGES = ROOT / "docs" / "images"


def report() -> None:
    """Train the example with a profile, and take pictures of its page, light and dark."""
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        sys.exit("no Chromium here\n  fix: apt-get install chromium")
    with tempfile.TemporaryDirectory() as folder:
        program = ROOT / "examples/mnist_pipeline/train_poptorch.py"
        flags = ["--epochs", "1", "--profile", "--profile-dir", f"{folder}/report"]
        subprocess.run([sys.executable, program, *flags], check=True)
        subprocess.run(
            [sys.executable, "-m", "popvision", "report", f"{folder}/report", "--no-browser"], check=True
        )
        for name, scheme in (("dark", 0), ("light", 1)):
            subprocess.run(
                [
                    *(browser, "--headless", "--no-sandbox", "--hide-scrollbars", "--window-size=1400,1000"),
                    *(f"--blink-settings=preferredColorScheme={scheme}", "--virtual-time-budget=3000"),
                    *(f"--user-data-dir={folder}/browser", f"--screenshot={IMAGES}/report-{name}.png"),
                    f"file://{folder}/report/report.html",
                ],
                check=True,
            )


class Chain(torch.nn.Module):
    """Linear layers, each a block on an ipu of its own, and a loss."""

    def __init__(self, ipus: int) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(
            poptorch.BeginBlock(torch.nn.Linear(8, 8), f"layer{i}", ipu_id=i) for i in range(ipus)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return poptorch.identity_loss(x, "mean")


def schedules(ipus: int, micro_batches: int, sharded: bool = False) -> dict[str, str]:
    """Return the schedules that `describe` prints, by their first word: those of "core" and of "ipu"."""
    options = poptorch.Options()
    options.Training.gradientAccumulation(micro_batches)
    strategy = poptorch.ShardedExecution if sharded else poptorch.PipelinedExecution
    options.setExecutionStrategy(strategy(poptorch.AutoStage.SameAsIpu))
    text = poptorch.describe(Chain(ipus), options, torch.randn(2 * micro_batches, 8)).schedule
    rows = re.findall(r"^(?:core|ipu) \d+ \| .*$", text, re.MULTILINE)
    return {kind: "\n".join(row for row in rows if row.startswith(kind)) for kind in ("core", "ipu")}


def drawings() -> dict[str, str]:
    """Return the SVG of each drawing, by its file's name."""
    threads = torch.get_num_threads()
    torch.set_num_threads(2)  # as many rows as `cores.svg` has
    try:
        four, sharded = schedules(4, 8), schedules(4, 4, sharded=True)
        cores = schedules(3, 6)["core"]
    finally:
        torch.set_num_threads(threads)
    return {
        "pipelined.svg": schedule_svg(
            four["ipu"], "Four ipus as devices of their own, pipelined, eight micro-batches"
        ),
        "sharded.svg": schedule_svg(sharded["ipu"], "Four ipus in turns, sharded"),
        "cores.svg": schedule_svg(cores, "Three ipus and six micro-batches on two cores"),
    }


if __name__ == "__main__":
    for file, svg in drawings().items():
        (IMAGES / file).write_text(svg)
    report()
