"""Finds stop texts in what a row has said so far, wherever tokens end within them."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

CONTEXT = 4
"""Tokens decoded before those that a stop text can span: some decoders treat the first token of a text differently."""


class StopTexts:
    """Watches one row; `says_stop` is told each token as it is drawn."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, texts: tuple[str, ...]) -> None:
        self._tokenizer = tokenizer
        self._texts = texts
        # each token that is text holds at least one byte of it
        self._window = max(len(text.encode()) for text in texts) + CONTEXT
        self._tokens: list[int] = []

    def says_stop(self, token: int) -> bool:
        """True when the text up to and with this token ends, or has just passed, one of the stop texts."""
        self._tokens = [*self._tokens[1 - self._window :], token]
        tail = self._tokenizer.decode(self._tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return any(text in tail for text in self._texts)
