"""Writes messages.md from the texts in the source and what remedies.yaml adds: python docs/write_messages.py"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import yaml

PAGE = Path(__file__).parent / "messages.md"
ROOT = PAGE.parent.parent
sys.path.append(str(ROOT))

from tools.messages import LITERAL, Message, messages  # noqa: E402

REMEDIES: dict[str, str] = yaml.safe_load((PAGE.parent / "remedies.yaml").read_text())
HEAD = """# Messages

    braid train config.yaml           # a mistake ends with exit code 2 and one line: what is wrong, where, and what to write instead
    braid train config.yaml --debug   # the same with Python's traceback

Look for some words of the line that you saw. Words in CAPITALS stand for what the program fills in. Where a line says itself what
to do, nothing is added here. Exit code 1 is a failure of a worker or of the machine, 130 is Ctrl-C. A traceback without one of these
lines is a fault: of a function of yours that it names, else of Braid.

For memory there is [out of memory](out-of-memory.md), for speed [slow runs](slow-runs.md). This page is written by
`docs/write_messages.py`.
"""
TOPICS = {
    "Commands, configuration and files": r"cli|catalogue|importing|errors|config/",
    "Models and data by name": r"hub",
    "Data": r"data/|runtimes/prepare/show_data",
    "Models, layouts and optimizers": r"models/",
    "Flows and algorithms": r"flow/|algorithms/",
    "Rewards": r"rewards/|runtimes/generating/verification",
    "Environments and the endpoint": r"rollout/episodes/",
    "Engines and servers": r"rollout/",
    "Before a run: what does not fit together": (
        r"runtimes/(prepare|start|session|distributed|hybrid/start|streaming/groups)|placement/(pools|residency)"
    ),
    "`braid plan`": r"placement/",
    "While a run goes on": (
        r"runtimes/(run|executor|step_metrics|evaluation|generating|hybrid|streaming)|observe/(progress|trackers)"
    ),
    "Checkpoints and run folders": r"runtimes/saving|observe/",
    "Processes, machines and Ray": r"cluster/",
    "The queue": r"transfer/",
}
"""Headings, and the files whose texts are under each: the first that fits."""
INFORMS = "Lines that inform"
PARTS = "Parts of messages"
VERBS = (
    "accept|add|begin|check|choose|copy|correct|end|fetch|give|go on|install|leave|lower|make|mend|move|name|pip install|place|put|raise"
    "|register|remove|resume|return|run `|save|say|set|shorten|show|start|take|train|use|wait|where there is a network|write|your own is"
)
SAYS = re.compile(
    rf"([;:,.] |and |, or |^)({VERBS})\b|Did you mean|, as in |PYTHONPATH|folder of a run|must (be|lie|have|hold)|needs at least"
    "|is defined for|is one of|lies over|see docs",
    re.IGNORECASE,
)
"""How a text looks that says itself what to do."""


def page() -> str:
    """Return the whole page."""
    found = messages()
    errors = [message for message in found if message.is_error and is_whole(message)]
    sections = {title: [message for message in errors if topic(message) == title] for title in TOPICS}
    sections[PARTS] = [message for message in found if not is_whole(message)]
    sections[INFORMS] = [message for message in found if not message.is_error and is_whole(message)]
    return HEAD + "".join(f"\n## {title}\n\n{entries(section)}" for title, section in sections.items() if section)


def is_whole(message: Message) -> bool:
    """Return whether one would look for a text under its topic: a message, or a part that says as much as one."""
    return not message.is_part or len(LITERAL.findall(message.text)) > 7


def topic(message: Message) -> str:
    """Return the heading that a message is under."""
    file = message.file.removeprefix("braidrl/")
    return next(title for title, files in TOPICS.items() if re.match(files, file))


def entries(section: list[Message]) -> str:
    """Return a section's messages as a list, in alphabetical order."""
    return "".join(f"- {entry(text)}\n" for text in sorted({message.text for message in section}, key=by_words))


def by_words(text: str) -> tuple[str, str]:
    return re.sub(r"\W", "", text).lower(), text


def entry(text: str) -> str:
    """Return a message, with its remedy where it has one here."""
    fence = "``" if "`" in text else "`"
    space = " " if text.startswith("`") or text.endswith("`") else ""
    told = remedy(text)
    return f"{fence}{space}{text}{space}{fence}" + (f"<br>{told}" if told else "")


def remedy(text: str) -> str:
    """Return what remedies.yaml says about a text."""
    return next((told for start, told in REMEDIES.items() if text.startswith(start)), "")


def without_remedy() -> list[str]:
    """Return the errors that neither say what to do nor have a remedy."""
    whole = [message.text for message in messages() if message.is_error and is_whole(message)]
    return [text for text in whole if not SAYS.search(re.sub(r"[A-Z_]{2,}", "", text)) and not remedy(text)]


def without_message() -> list[str]:
    """Return the remedies of no message."""
    texts = [message.text for message in messages()]
    return [start for start in REMEDIES if not any(text.startswith(start) for text in texts)]


if __name__ == "__main__":
    PAGE.write_text(page())
    missing = [f"remedies.yaml: nothing says what to do about: {text}" for text in without_remedy()]
    unused = [f"remedies.yaml: there is no such message: {start}" for start in without_message()]
    sys.exit("\n".join([*missing, *unused]) or None)
