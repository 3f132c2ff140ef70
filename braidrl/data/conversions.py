"""Conversions from records to examples: built-in ones for popular data sets, by name, and users' own functions.

record of the data set ──function──▶ {prompt, answer, ...}, or a text with the reason to skip the record

KNOWN maps repositories of the hub to conversions, which are used unless a source names another.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from braidrl.data.records import Record
from braidrl.importing import PluginRegistry

CONVERSIONS = PluginRegistry(
    "data conversion",
    {
        name: f"braidrl.data.conversions:{name}"
        for name in ("gsm8k", "math", "dapo_math_17k", "deepscaler", "aime", "hh", "ultrafeedback")
    },
)


@dataclass(frozen=True)
class KnownDataset:
    """Default conversion, subset and split of a data set on the hub."""

    convert: str
    subset: str | None = None
    split: str | None = None


KNOWN: Mapping[str, KnownDataset] = {
    "openai/gsm8k": KnownDataset("gsm8k", "main"),
    "EleutherAI/hendrycks_math": KnownDataset("math"),
    "DigitalLearningGmbH/MATH-lighteval": KnownDataset("math", "default"),
    "HuggingFaceH4/MATH-500": KnownDataset("math"),
    "BytedTsinghua-SIA/DAPO-Math-17k": KnownDataset("dapo_math_17k"),
    "agentica-org/DeepScaleR-Preview-Dataset": KnownDataset("deepscaler"),
    "HuggingFaceH4/aime_2024": KnownDataset("aime"),
    "Maxwell-Jia/AIME_2024": KnownDataset("aime"),
    "BytedTsinghua-SIA/AIME-2024": KnownDataset("aime"),
    "math-ai/aime25": KnownDataset("aime"),
    "yentinglin/aime_2025": KnownDataset("aime", "default"),
    "Anthropic/hh-rlhf": KnownDataset("hh"),
    "HuggingFaceH4/ultrafeedback_binarized": KnownDataset("ultrafeedback", split="train_prefs"),
    "trl-lib/ultrafeedback_binarized": KnownDataset("ultrafeedback"),
}
"""Defaults by repository. The split is `train`, and `test` for evaluation, if not given here."""
UNIQUE = ("dapo_math_17k", "aime")
"""Data sets that were published with repeated rows."""


def gsm8k(record: Record) -> Record | str:
    """Convert GSM8K (`openai/gsm8k`): `question`, and `answer` with the solution before `####`, which becomes the
    response to train on.
    """
    _, mark, answer = record["answer"].rpartition("####")
    if not mark:
        return "the answer has no ####"
    return {"prompt": record["question"], "answer": answer.strip().replace(",", ""), "response": record["answer"]}


def math(record: Record) -> Record | str:
    """Convert MATH (Hendrycks et al., and MATH-500): `problem`, `level`, and `answer` or otherwise the last box of
    `solution`.
    """
    answer = record.get("answer") or last_boxed(record["solution"])
    if answer is None:
        return "the solution has no \\boxed answer"
    about: Record = {name: record[name] for name in ("level", "type", "subject") if name in record}
    return {"prompt": record["problem"], "answer": answer, "response": record["solution"], **about}


def dapo_math_17k(record: Record) -> Record | str:
    """Convert DAPO-Math-17k: chat messages and `reward_model.ground_truth`, an integer; each prompt once.

    Integers in other notation (34.0, 1,234, \\boxed{5}) are converted; rows with other answers are skipped.
    """
    answer = as_integer(str(record["reward_model"]["ground_truth"]))
    if answer is None:
        return "the answer is no integer"
    return {"prompt": record["prompt"], "answer": str(answer), "data_source": record.get("data_source")}


def deepscaler(record: Record) -> Record | str:
    """Convert DeepScaleR-Preview: `problem` and `answer`, from AIME, AMC, Omni-MATH and Still; rows without an answer
    are skipped.
    """
    answer = str(record["answer"]).strip()
    return {"prompt": record["problem"], "answer": answer} if answer else "the answer is empty"


def aime(record: Record) -> Record | str:
    """Convert AIME 2024 or 2025 in any form on the hub: `problem`, `Problem` or `question`, or chat messages; each
    prompt once.
    """
    ground_truth = (record.get("reward_model") or {}).get("ground_truth")
    fields = {name.lower(): value for name, value in record.items()}
    answer = as_integer(str(fields.get("answer", ground_truth)))
    if answer is None or not 0 <= answer <= 999:
        return "the answer is no integer from 0 to 999"
    prompt = next(fields[name] for name in ("problem", "question", "prompt") if fields.get(name))
    return {"prompt": prompt, "answer": str(answer)}


TURN = re.compile(r"\n\n(Human|Assistant):")
ROLES = {"Human": "user", "Assistant": "assistant"}


def hh(record: Record) -> Record | str:
    """Convert HH-RLHF: two conversations, text with `Human:` and `Assistant:`, that differ in the last answer; for
    preferences.
    """
    conversations = []
    for text in (record["chosen"], record["rejected"]):
        _, *parts = TURN.split(text)
        turns = zip(parts[::2], parts[1::2], strict=True)
        conversations.append([{"role": ROLES[speaker], "content": content.strip()} for speaker, content in turns])
    return as_pair(*conversations)


def ultrafeedback(record: Record) -> Record | str:
    """Convert UltraFeedback, binarized: `chosen` and `rejected` as chat messages with scores; pairs with equal scores
    are skipped.
    """
    scores = record.get("score_chosen"), record.get("score_rejected")
    if None not in scores and scores[0] == scores[1]:
        return "both responses have the same score"
    return as_pair(record["chosen"], record["rejected"])


def as_pair(chosen: list[Record], rejected: list[Record]) -> Record | str:
    """Return the example of two conversations with a common beginning, or the reason to skip it."""
    if not (chosen and rejected) or chosen[:-1] != rejected[:-1]:
        return "the two conversations differ before their last answer"
    answers = [conversation[-1]["content"] for conversation in (chosen, rejected)]
    if any(conversation[-1]["role"] != "assistant" for conversation in (chosen, rejected)):
        return "a conversation does not end with an answer"
    if answers[0] == answers[1]:
        return "both responses are the same"
    return {"prompt": chosen[:-1], "chosen": answers[0], "rejected": answers[1]}


def as_integer(text: str) -> int | None:
    """Return the integer in a text, in any usual notation, or None."""
    bare = (last_boxed(text) or text).strip().strip("$").replace(",", "").replace("−", "-").strip()
    match = re.fullmatch(r"([+-]?\d+)(\.0*)?", bare)
    return int(match[1]) if match else None


def last_boxed(text: str) -> str | None:
    """Return the content of the last complete `\\boxed{...}` of a text; None if there is none."""
    contents = [content for content, start, _ in boxed_parts(text) if text.startswith("{", start + len("\\boxed"))]
    return contents[-1].strip() if contents else None


BOX = re.compile(r"\\boxed\s*(\{|[^\s{}])")


def boxed_parts(text: str) -> list[tuple[str, int, int]]:
    r"""Return the content, start and end of every complete `\boxed{...}` of a text, nested braces included, and of
    `\boxed 5`.
    """
    parts = []
    for match in BOX.finditer(text):
        depth, end = int(match[1] == "{"), match.end()
        while depth and end < len(text):
            # An escaped brace, such as a set's, closes nothing.
            depth += {"{": 1, "}": -1}.get(text[end], 0) if text[end - 1] != "\\" else 0
            end += 1
        if not depth:
            parts.append((text[match.end() : end - 1] if match[1] == "{" else match[1], match.start(), end))
    return parts
