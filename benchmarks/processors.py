"""The README's table: the best of ours against the best rival, on this processor, and on one without AVX-512.

A second run of each benchmark limits oneDNN and torch's own kernels to AVX2, by their environment variables.
"""

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path

from harness import environment, markdown

FOLDERS = {
    "mnist_pipeline": "digits",
    "resnet20": "ResNet-20",
    "gpt2": "GPT-2 nano",
    "bert": "BERT, 4 layers",
}
KINDS = {"as it is": {}, "AVX2": {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}}
ROW = re.compile(r"^\| (?P<name>\S.*?) *\|.*\| +(?P<speed>[\d.]+)× \|", re.MULTILINE)


def speeds(folder: str, variables: dict[str, str], flags: list[str]) -> dict[str, float]:
    """Run a benchmark; return each contender's speed, as times plain PyTorch with one thread."""
    command = [sys.executable, str(Path(__file__).parent / folder / "main.py"), *flags]
    done = subprocess.run(
        command, env={**os.environ, **variables}, stdout=subprocess.PIPE, text=True, check=True
    )
    print(done.stdout, file=sys.stderr)
    return {row["name"]: float(row["speed"]) for row in ROW.finditer(done.stdout)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folders", nargs="+", choices=FOLDERS, default=[*FOLDERS])
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=[*KINDS])
    args, flags = parser.parse_known_args()  # the flags of the benchmarks, such as --rounds
    where, rows = environment(), []
    for kind in args.kinds:
        for folder in args.folders:
            found = speeds(folder, KINDS[kind], flags)
            ours = {name: speed for name, speed in found.items() if name.startswith("Pando")}
            rivals = {name: speed for name, speed in found.items() if name not in ours}
            best, rival = max(ours, key=ours.__getitem__), max(rivals, key=rivals.__getitem__)
            ratio = f"{ours[best] / rivals[rival]:.2f}×"
            row = [
                f"{FOLDERS[folder]}, {kind}",
                best,
                f"{ours[best]:.2f}×",
                rival,
                f"{rivals[rival]:.2f}×",
                ratio,
            ]
            rows.append(row)
    head = ["model, processor", "best of Pando", "speed", "best rival", "speed", "Pando / rival"]
    print(markdown(head, rows))
    print(where)


if __name__ == "__main__":
    main()
