"""A user-defined tracker: one line of tab-separated numbers per step, for a spreadsheet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from braidrl.observe.trackers import TrackedRun


class Spreadsheet:
    """A tracker chosen by `trackers: [tensorboard, {name: examples/plugins/tracker.py:Spreadsheet, params: {columns:
    [reward/mean]}}]`.
    """

    def __init__(self, run: TrackedRun, *, columns: Sequence[str] = ("reward/mean", "actor/grad_norm")) -> None:
        path, self.columns = run.folder / "metrics.tsv", columns
        lines = path.read_text().splitlines(keepends=True) if run.resume_step is not None else []
        kept = [line for line in lines[1:] if int(line.split("\t")[0]) <= (run.resume_step or 0)]
        self.file = path.open("w")
        self.file.writelines(["\t".join(["step", *columns]) + "\n", *kept])

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self.file.write("\t".join([str(step), *(str(metrics.get(name, "")) for name in self.columns)]) + "\n")
        self.file.flush()

    def close(self) -> None:
        self.file.close()
