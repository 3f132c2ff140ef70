"""The records of a run for people: metrics, trackers and the report.

step ─metrics─▶ metrics.jsonl, trackers ─▶ report.html
"""

from collections.abc import Mapping
from pathlib import Path

from braidrl.config import Config
from braidrl.errors import UserError, first_line, no_room
from braidrl.observe.metrics import MetricsWriter
from braidrl.observe.progress import Progress
from braidrl.observe.report import samples_of_step, write_report
from braidrl.observe.trackers import TrackedRun, Trackers
from braidrl.runtimes.saving.folders import with_changes


class RunRecords:
    """The records of a run, which its first rank writes; on other ranks nothing is written."""

    def __init__(self, folder: Path, config: Config, progress: Progress) -> None:
        self.folder, self.config, self.progress = folder, config, progress
        self.writer: MetricsWriter | None = None

    def open(self, resume_step: int | None) -> None:
        """Open the metrics files, or open them again after a step; a resumed run also writes its configuration, in
        which changes are no longer accepted.
        """
        self.close()
        if resume_step is not None:
            accepted = self.config.trainer.model_copy(update={"accept_changes": []})
            for line in with_changes(self.folder, self.config.model_copy(update={"trainer": accepted})):
                self.progress.print(line)
        run = TrackedRun(self.folder, self.config.model_dump(mode="json"), resume_step)
        # A new run that ends here loses nothing; a resumed run continues without a tracker.
        trackers = Trackers(self.config.trackers, run, self.progress.print, must_open=resume_step is None)
        self.writer = writer = MetricsWriter(self.folder, resume_step, trackers=trackers)
        if resume_step and writer.lacking:
            steps = ", ".join(map(str, writer.lacking[:5])) + (", ..." if len(writer.lacking) > 5 else "")
            self.progress.print(f"metrics.jsonl lacks steps that this run has made: {steps}; it goes on without them")

    def write(self, step: int, metrics: Mapping[str, float | int | None]) -> None:
        """Write the metrics of a step, and give its samples to the trackers."""
        if self.writer is not None:
            self.writer.write(metrics)
            self.writer.trackers.write_samples(step, lambda: samples_of_step(self.folder, step))

    def report(self, rehearsal: bool = False) -> None:
        """Write the report from the run's folder.

        A failure is printed; in a `rehearsal` before the first step it is raised.
        """
        if self.writer is None:
            return
        try:
            report = write_report(self.folder)
        except Exception as error:
            what = f"{type(error).__name__}: {first_line(error)}"
            if not rehearsal:
                again = f"`braid report {self.folder}` writes it again"
                self.progress.print(f"report.html could not be written ({what}); {again}")
                return
            if isinstance(error, UserError) or no_room(error):
                raise
            raise UserError(f"the run's report cannot be written ({what}); fix that before training") from error
        if not rehearsal:
            self.progress.print(f"report: {report}")
            self.writer.trackers.write_report(report)

    def close(self) -> None:
        """Close the files."""
        if self.writer is not None:
            self.writer.close()
