"""Prompt templates. This is the only place where prompt text is tokenised, and each text is tokenised once."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from braidrl.data.rendering import render_chat
from braidrl.data.sources import ChatMessage, Prompt
from braidrl.errors import UserError


@dataclass(frozen=True)
class PromptTemplate:
    """Turns prompts into token ids with one transformers tokenizer.

    With `chat_template` on, and a tokenizer that has one, a text is a user's message and the template opens the assistant's turn.
    Otherwise prompts are plain text with the special tokens that the tokenizer adds; messages are then their contents, with a
    blank line between them. `system_prompt` comes first in both, unless the example has a system message of its own.
    """

    tokenizer: Any
    chat_template: bool = True
    system_prompt: str | None = None

    @property
    def is_chat(self) -> bool:
        """Return True if prompts are rendered with the tokenizer's chat template."""
        return self.chat_template and bool(self.tokenizer.chat_template)

    def messages(self, prompt: Prompt) -> list[ChatMessage]:
        """Return the conversation before the response, with the system prompt."""
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        if self.system_prompt is None or messages[0]["role"] == "system":
            return messages
        return [{"role": "system", "content": self.system_prompt}, *messages]

    def render(self, prompt: Prompt) -> str:
        """Render the text whose tokens the model gets. Raises UserError when the chat template refuses the messages."""
        messages = self.messages(prompt)
        if not self.is_chat:
            return "\n\n".join(message["content"] for message in messages)
        return render_chat(self.tokenizer, messages)

    def encode_text(self, texts: Sequence[str]) -> list[list[int]]:
        """Tokenise rendered prompts. A chat template has written its special tokens into the text already."""
        return self._encode(texts, add_special_tokens=not self.is_chat)

    def encode_plain(self, text: str) -> list[int]:
        """Tokenise a text with the special tokens that the tokenizer adds, whether or not there is a chat template."""
        return self._encode([text], add_special_tokens=True)[0]

    def encode(self, prompt: Prompt) -> list[int]:
        """Tokenise one prompt. Raises UserError when the chat template refuses the messages."""
        return self.encode_text([self.render(prompt)])[0]

    def encode_responses(self, responses: Sequence[str]) -> list[list[int]]:
        """Tokenise given responses, each followed by the end of sequence. Raises UserError where the tokenizer has none."""
        end = self.tokenizer.eos_token_id
        if end is None:
            raise UserError(
                "the tokenizer has no eos_token, so a response could not end; set it in its tokenizer_config.json"
            )
        return [[*ids, end] for ids in self._encode(responses, add_special_tokens=False)]

    def _encode(self, texts: Sequence[str], add_special_tokens: bool) -> list[list[int]]:
        if not texts:
            return []
        # verbose=False: the tokenizer would warn about each prompt that the length filter drops anyway.
        encoded = self.tokenizer(
            list(texts), add_special_tokens=add_special_tokens, return_attention_mask=False, verbose=False
        )
        return encoded["input_ids"]
