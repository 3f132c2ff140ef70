"""End tokens of a response: one set for engines, evaluation, `finish_reason`, given responses and verified text."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

MARK = "the-assistants-turn-stands-here"


def end_ids_of(folder: Path, tokenizer: Any) -> tuple[int, ...]:
    """Return the ids that end a response of the model in a Hugging Face directory; see `end_of_sequence_ids`."""
    files = [folder / name for name in ("generation_config.json", "config.json")]
    return end_of_sequence_ids(tokenizer, *(json.loads(file.read_bytes()) for file in files if file.is_file()))


def end_of_sequence_ids(tokenizer: Any, *settings: Any) -> tuple[int, ...]:
    """Return the end-of-sequence ids of the tokenizer and of the model's settings, and the end of a turn in the chat template.

    Args:
        tokenizer: The run's tokenizer.
        settings: The model's generation settings and configuration, as objects or as JSON.
    """
    found = [tokenizer.eos_token_id]
    for each in settings:
        for part in (each, field_of(each, "text_config")):
            ends = field_of(part, "eos_token_id")
            found += ends if isinstance(ends, Sequence) else [ends]
    return tuple(dict.fromkeys(token for token in (*found, turn_end_id(tokenizer)) if token is not None))


def field_of(settings: Any, name: str) -> Any:
    return settings.get(name) if isinstance(settings, Mapping) else getattr(settings, name, None)


def special_tokens(tokenizer: Any) -> dict[int, str]:
    """Return the special tokens by id: the named ones, and added ones marked as special, as Gemma 3 and Phi 3 have the end of a turn."""
    named = dict(zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True))
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return named | {number: token.content for number, token in added.items() if token.special}


def turn_end_id(tokenizer: Any) -> int | None:
    """Return the special token that closes an assistant's turn in the chat template, or None."""
    if not getattr(tokenizer, "chat_template", None):
        return None
    turn = [{"role": "user", "content": "-"}, {"role": "assistant", "content": MARK}]
    try:
        after = tokenizer.apply_chat_template(turn, tokenize=False).rpartition(MARK)[2]
    # A template may refuse this conversation with any exception; its end of a turn is then unknown.
    except Exception:
        return None
    ids = tokenizer(after.lstrip(), add_special_tokens=False)["input_ids"]
    return ids[0] if ids and ids[0] in special_tokens(tokenizer) else None
