"""`braid rollouts`: a run's recorded rows as a table, one episode in full, or both as a local web page."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from braidrl.errors import UserError
from braidrl.observe.episodes import Filter, RowIndex, episode, tokenizer_of

Say = Callable[[str], object]
SHOWN = ("reward", "score", "correct", "action_tokens", "finish_reason")


def figure(value: Any) -> str:
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def show_table(run: Path, evaluation: str | None, row_filter: Filter, rows: int, say: Say) -> None:
    """Print the first rows that pass a filter. Raises UserError if there are no recordings."""
    index = RowIndex(run, evaluation)
    chosen = index.choose(row_filter)
    names = [name for name in SHOWN if name in index.numbers]
    lines = [["row", *names]]
    for row in chosen[:rows]:
        summary = index.summary(row)
        lines.append(
            [f"{summary['step']}.{summary['group']}.{summary['sample']}", *(figure(summary[name]) for name in names)]
        )
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    for line in lines:
        say("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))
    say(f"{len(chosen[:rows])} of {len(chosen)} rows; {len(index)} are recorded. --row STEP.GROUP.SAMPLE shows one")


def show_row(run: Path, evaluation: str | None, name: str, say: Say) -> None:
    """Print one episode: its numbers, and the text and mean values of each segment.

    Raises UserError if there is none.
    """
    parts = name.split(".")
    if len(parts) != 3 or not all(part.isdecimal() for part in parts):
        raise UserError(f"--row {name} must be STEP.GROUP.SAMPLE, as in the table of `braid rollouts {run}`")
    index = RowIndex(run, evaluation)
    shown = episode(*index.record(index.find(*map(int, parts))), tokenizer_of(run))
    say(", ".join(f"{key} {figure(value)}" for key, value in shown["numbers"].items()))
    for segment in shown["segments"]:
        say(f"\n--- {', '.join(facts_of(segment))}")
        say(
            segment["text"]
            if segment["text"] is not None
            else " ".join(str(token["id"]) for token in segment["tokens"])
        )
    if shown["other_columns"]:
        say(f"\nalso recorded: {', '.join(shown['other_columns'])}")


def facts_of(segment: dict[str, Any]) -> Iterator[str]:
    """Yield a segment's kind, its number of tokens, the values of its turn and the means of those of its tokens."""
    if "policy" in segment:
        yield segment["policy"]
    yield segment["kind"] if segment["turn"] is None else f"turn {segment['turn'] + 1}"
    yield f"{segment['count']} tokens"
    for name, value in segment.get("values", {}).items():
        yield f"{name} {figure(value)}"
    for name in segment["tokens"][0].keys() - {"id", "text", "image"} if segment["tokens"] else ():
        numbers = [token[name] for token in segment["tokens"] if token[name] is not None]
        if numbers:
            yield f"mean {name} {figure(sum(numbers) / len(numbers))}"


def serve(run: Path, port: int, say: Say) -> None:
    """Serve the web page until Ctrl-C."""
    from braidrl.observe.rollouts_page import PageServer

    with PageServer(run, port) as server:
        say(f"{len(server.recordings.index(server.recordings.first_set()))} rows at {server.address} (Ctrl-C ends)")
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            say("")
