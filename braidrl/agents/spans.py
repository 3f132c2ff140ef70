"""Spans of episodes by OpenTelemetry: one for an episode, and in it one for each call of the engine or the environment.

episode  ├─ make ─ reset ─ chat ─ step ─ chat ─ step ─ close        attributes: row, policy, tokens, score, failure

They go to files, or by OTLP to any service that takes it; its address and headers are OpenTelemetry's own variables,
`OTEL_EXPORTER_OTLP_ENDPOINT` and so on.
"""

import importlib.util
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from braidrl.errors import UserError

OTLP = "otlp"
"""The destination that is no folder."""


class EpisodeSpans:
    """The spans of a process's episodes; nothing is recorded without a destination."""

    def __init__(self, destination: str | None = None) -> None:
        """Start to write to a folder, or to send to a service. Raises UserError if OpenTelemetry is not installed."""
        self._provider: Any = None
        if destination is None:
            return
        check_spans(destination)
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter

        exporter: Any
        if destination == OTLP:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

            exporter = OTLPSpanExporter()
        else:
            folder = Path(destination).expanduser()
            folder.mkdir(parents=True, exist_ok=True)
            self._file = (folder / f"{platform.node()}-{os.getpid()}.jsonl").open("a")
            exporter = ConsoleSpanExporter(out=self._file, formatter=lambda span: f"{span.to_json(indent=None)}\n")
        self._provider = TracerProvider()
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("braidrl")

    @contextmanager
    def span(self, name: str, **attributes: str | float | None) -> Iterator[dict[str, str | float | None]]:
        """Record the block as a span inside the caller's span; entries of the yielded dict become attributes."""
        if self._provider is None:
            yield attributes
            return
        with self._tracer.start_as_current_span(name) as span:
            try:
                yield attributes
            finally:
                span.set_attributes({key: value for key, value in attributes.items() if value is not None})

    def close(self) -> None:
        """Write or send the remaining spans."""
        if self._provider is not None:
            self._provider.shutdown()


def check_spans(destination: str | None) -> None:
    """Raise UserError if spans are configured and OpenTelemetry's SDK is not installed."""
    needed = "opentelemetry.exporter" if destination == OTLP else "opentelemetry.sdk"
    if destination is None or (importlib.util.find_spec("opentelemetry") and importlib.util.find_spec(needed)):
        return
    raise UserError(f"rollout.environment.spans={destination} needs {needed}; install `pip install 'braidrl[spans]'`")
