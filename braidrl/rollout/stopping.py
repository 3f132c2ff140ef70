"""What ends a response: the model's end of sequence, and stop texts, found wherever tokens end within them."""

from pathlib import Path

from transformers import GenerationConfig, PreTrainedTokenizerBase

CONTEXT = 4
"""Tokens decoded before those that a stop text can span: some decoders treat the first token of a text differently."""


class StopTexts:
    """Watches one row for stop texts."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, texts: tuple[str, ...]) -> None:
        self._tokenizer = tokenizer
        self._texts = texts
        # each token that is text holds at least one byte of it
        self._window = max(len(text.encode()) for text in texts) + CONTEXT
        self._tokens: list[int] = []

    def contains_stop_text(self, token: int) -> bool:
        """Append a token; returns True when the text now ends with, or has just passed, one of the stop texts."""
        self._tokens = [*self._tokens[1 - self._window :], token]
        tail = self._tokenizer.decode(self._tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return any(text in tail for text in self._texts)


def end_of_sequence_ids(settings: GenerationConfig | None, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Return the tokenizer's end of sequence and those of the model's generation settings."""
    configured = getattr(settings, "eos_token_id", None)
    several = configured if isinstance(configured, list) else [configured]
    return tuple(dict.fromkeys(token for token in (tokenizer.eos_token_id, *several) if token is not None))


def end_ids_of(folder: Path, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Return `end_of_sequence_ids` for the model in a directory.

    Args:
        folder: A Hugging Face directory.
        tokenizer: The model's.
    """
    settings = GenerationConfig.from_pretrained(folder) if (folder / "generation_config.json").is_file() else None
    return end_of_sequence_ids(settings, tokenizer)
