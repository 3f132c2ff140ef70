"""`make gpu`: every check and every table on one device, in minutes; `make gpu DEVICE=cpu SIZE=tiny` runs the same
parts without a GPU.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.utils import logging

from benchmarks.gpu.checks import CHECKS, Place, lacking
from benchmarks.gpu.engines import engines
from benchmarks.gpu.models import SHAPES
from benchmarks.gpu.tables import SIZES, TABLES, linear_attention, rates


class Record:
    """Results so far, in a file that is written after each part."""

    def __init__(self, path: Path, head: dict[str, Any], only: Sequence[str] = ()) -> None:
        self.path, self.found, self.failed, self.only = path, {**head, "parts": {}}, False, only

    def part(self, name: str, work: Callable[[], Any]) -> Any:
        """Run one part, print its result and save it; None if only others were asked for."""
        if self.only and not any(word in name for word in (*self.only, "rates")):
            return None
        start, said = time.perf_counter(), None
        try:
            said = work()
            status = "ok"
        except Exception as error:
            traceback.print_exc()
            status, self.failed = f"FAILED: {type(error).__name__}: {str(error)[:300]}", True
        took = round(time.perf_counter() - start, 2)
        self.found["parts"][name] = {"status": status, "seconds": took, "found": said}
        print(f"{name}: {status}, {took} s", *lines(said), sep="\n  ", flush=True)
        self.path.write_text(json.dumps(self.found, indent=1) + "\n")
        self.path.with_suffix(".md").write_text(page(self.found))
        return said


def lines(said: Any) -> list[str]:
    """Return a part's result as lines, one for each row of a table."""
    rows = said if isinstance(said, list) else [said or {}]
    return [", ".join(f"{name} {shown(value)}" for name, value in row.items()) for row in rows]


def shown(value: Any) -> str:
    return f"{value:,.4g}" if isinstance(value, float) else str(value)


def page(found: dict[str, Any]) -> str:
    """Return the results as Markdown: a table of the parts, and the rows of each table."""
    text = [
        f"# `make gpu` on {found['device']}",
        "",
        f"torch {found['torch']}, transformers {found['transformers']}, {found['size']}",
        "",
    ]
    text += ["| part | | seconds |", "|---|---|---|"]
    text += [f"| {name} | {part['status']} | {part['seconds']} |" for name, part in found["parts"].items()]
    for name, part in found["parts"].items():
        if isinstance(part["found"], list) and part["found"]:
            keys = list(part["found"][0])
            text += ["", f"| {name}: {' | '.join(keys)} |", "|---" * len(keys) + "|"]
            text += [f"| {' | '.join(shown(row[key]) for key in keys)} |" for row in part["found"]]
    return "\n".join(text) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--size", choices=tuple(SIZES), default="full")
    parser.add_argument("--parts", default="", help="only the parts whose names contain one of these words")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results"))
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("there is no CUDA device; `make gpu DEVICE=cpu SIZE=tiny` runs every part without one")
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    name = torch.cuda.get_device_name() if arguments.device == "cuda" else "cpu"
    head = {
        "device": name,
        "size": arguments.size,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    arguments.output.mkdir(parents=True, exist_ok=True)
    record = Record(
        arguments.output / f"gpu-{name.replace(' ', '-').lower()}-{arguments.size}.json", head, arguments.parts.split()
    )
    with tempfile.TemporaryDirectory(prefix="braid-gpu-") as folder:
        run(record, arguments.device, arguments.size, Path(folder))
    sys.exit(record.failed)


def run(record: Record, device: str, size: str, folder: Path) -> None:
    """Run every check, then every table for each model."""
    place = Place(device, folder)
    for name, (check, packages) in CHECKS.items():
        if missing := lacking(packages):
            print(f"{name}: needs {', '.join(missing)}, left out", flush=True)
            continue
        record.part(name, lambda check=check: check(place))  # type: ignore[misc]
    record.part("linear attention", lambda: linear_attention(device, folder, size, SIZES[size].repeats))
    known = record.part("rates", lambda: rates(device))
    for shape in SHAPES[size] if known else ():
        for name, table in {**TABLES, "engines": engines}.items():
            measure = partial(table, device, folder, shape, SIZES[size], known)
            record.part(f"{name}, {shape.name}", measure)


if __name__ == "__main__":
    main()
