"""Prompt templates. This is the only place where prompt text is tokenised, and each text is tokenised once.

prompt ──chat template──▶ text ──tokenizer──▶ prompt ids              conversation ──▶ prompt | turn | between | turn
                          text that opens the assistant's turn                       ids, and the mask of trained ones

A role that only scores may have another tokenizer: `retokenized` gives it the same texts in its own token ids.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch

from braidrl.algorithms.ragged import Ragged, join_response
from braidrl.config import DataConfig
from braidrl.data import chat
from braidrl.data.records import whole_text
from braidrl.data.rows import IDENTITY, Rows
from braidrl.data.sources import Example, Prompt, Response
from braidrl.errors import UserError

RENDERED_OTHERWISE = (
    "the chat template renders earlier turns otherwise once the conversation continues, such as without their "
    "reasoning; "
    "write train_on: last"
)
OPENING = re.compile(r"(<[^<>/\s]+>)\s*\Z")
"""A tag at the end of the text that opens a turn, such as `<think>`."""


class Given(NamedTuple):
    """A given response as token ids, and the mask of trained ones."""

    ids: list[int]
    trained: list[bool]


@dataclass(frozen=True)
class PromptTemplate:
    """A converter of prompts into token ids with one transformers tokenizer.

    With `chat_template`, and a tokenizer that has one, text becomes a user's message and the template opens the
    assistant's turn. If the last message is the assistant's, its turn is continued. Otherwise prompts are plain text
    after the tokenizer's special tokens, and messages are joined with blank lines. `system_prompt` comes first in both
    cases, unless the example has its own system message. `arguments` are the chat template's.
    """

    tokenizer: Any
    chat_template: bool = True
    system_prompt: str | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)

    @staticmethod
    def of(tokenizer: Any, data: DataConfig) -> "PromptTemplate":
        return PromptTemplate(tokenizer, data.chat_template, data.system_prompt, data.template)

    def with_arguments(self, arguments: Mapping[str, Any]) -> "PromptTemplate":
        """Return the template with further arguments of the chat template, such as those of a row."""
        return replace(self, arguments={**self.arguments, **arguments}) if arguments else self

    @property
    def is_chat(self) -> bool:
        return self.chat_template and bool(self.tokenizer.chat_template)

    @cached_property
    def shows_tools(self) -> bool:
        """Return True if the chat template tells the model its tools; some templates do not read them."""
        messages, _ = chat.TRIALS[0]
        return self.is_chat and self.apply(messages, (chat.TOOL,)) != self.apply(messages)

    @cached_property
    def end_id(self) -> int:
        """Return the token that ends a given response. Raises UserError if the tokenizer has none."""
        end: int | None = chat.turn_end_id(self.tokenizer) if self.is_chat else None
        end = self.tokenizer.eos_token_id if end is None else end
        if end is None:
            raise UserError(
                "the tokenizer has no eos_token, so a response could not end; set it in its tokenizer_config.json"
            )
        return end

    def messages(self, prompt: Prompt) -> list[chat.ChatMessage]:
        """Return the conversation before the response, with the system prompt."""
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        if self.system_prompt is None or messages[0]["role"] == "system":
            return messages
        return [{"role": "system", "content": self.system_prompt}, *messages]

    def render(self, prompt: Prompt, tools: chat.Tools = ()) -> str:
        """Render a prompt as text. Raises UserError if the chat template refuses the messages."""
        messages = self.messages(prompt)
        if not self.is_chat:
            return "\n\n".join(message["content"] for message in messages)
        *before, last = messages
        if last["role"] != "assistant":
            return self.apply(messages, tools, opens=True)
        if last.get("tool_calls"):
            raise UserError(
                "the last message is an assistant's call of a tool; add the tool's answer, or remove the call"
            )
        opened, started = self.apply(before, tools, opens=True), last["content"]
        tag = OPENING.search(opened)
        # The template may open the turn with the same tag as the turn itself.
        return (opened[: tag.start()] if tag and started.lstrip().startswith(tag[1]) else opened) + started

    def apply(self, messages: Sequence[chat.ChatMessage], tools: chat.Tools = (), opens: bool = False) -> str:
        """Render messages, with `opens` up to the assistant's turn.

        Raises UserError if the template refuses, fails or breaks a limit.
        """
        settings = {"tools": list(tools) or None, "tokenize": False, "add_generation_prompt": opens, **self.arguments}
        try:
            with chat.WATCH:
                text: str = self.tokenizer.apply_chat_template(list(messages), **settings)
        except chat.Overdue as error:
            raise UserError(f"the tokenizer's chat template {error} for these messages") from None
        except Exception as error:  # a template is a program and may raise anything
            name = "" if "Template" in type(error).__name__ else f"{type(error).__name__}: "
            raise UserError(
                f"the tokenizer's chat template refuses the messages: {name}{' '.join(str(error).split())[:500]}"
            ) from None
        if len(text) > chat.RENDERED_CHARACTERS:
            raise UserError(
                f"the tokenizer's chat template makes a text of {len(text)} characters, and at most "
                f"{chat.RENDERED_CHARACTERS} are taken"
            )
        return text

    def encode_texts(self, texts: Sequence[str], begins: bool = False) -> list[list[int]]:
        """Tokenise texts, without tokens that the tokenizer appends.

        Texts that begin a sequence get one beginning of sequence. Texts in its middle get none, and rendered chats have
        their own.
        """
        if not texts:
            return []
        # verbose=False avoids warnings about long prompts, which the length filter drops later.
        settings = {"add_special_tokens": begins, "return_attention_mask": False, "verbose": False}
        encoded: list[list[int]] = self.tokenizer(list(map(whole_text, texts)), **settings)["input_ids"]
        found, bos = [], self.tokenizer.bos_token_id
        for ids in encoded if begins else ():
            ids = ids[: len(ids) - self._appended]
            while bos is not None and ids[:2] == [bos, bos]:
                ids = ids[1:]
            found.append(ids)
        return found if begins else encoded

    @cached_property
    def _appended(self) -> int:
        """Return the number of special tokens that the tokenizer appends to a text."""
        plain, whole = (self.tokenizer("a", add_special_tokens=special)["input_ids"] for special in (False, True))
        ends = [end for end in range(len(plain), len(whole) + 1) if whole[end - len(plain) : end] == plain]
        return len(whole) - ends[-1] if ends else 0

    def encode(self, prompt: Prompt, tools: chat.Tools = ()) -> list[int]:
        """Tokenise one prompt. Raises UserError if the chat template refuses the messages."""
        return self.encode_texts([self.render(prompt, tools)], begins=not self.is_chat)[0]

    def encode_responses(self, responses: Sequence[str]) -> list[list[int]]:
        """Tokenise given responses, each with one end of sequence. Raises UserError if the tokenizer has none."""
        end = self.end_id
        encoded = self.encode_texts(responses)
        return [ids if ids and ids[-1] in (end, self.tokenizer.eos_token_id) else [*ids, end] for ids in encoded]

    def encode_given(self, example: Example, responses: Sequence[Response]) -> list[Given]:
        """Tokenise an example's responses: texts, or messages whose answers are trained.

        Raises UserError if rendered otherwise.
        """
        found = []
        for response in responses:
            if isinstance(response, str):
                (ids,) = self.encode_responses([response])
                found.append(Given(ids, [True] * len(ids)))
                continue
            *turns, (final, _) = self._turns(example, response)
            given, end = Given([], []), self.end_id
            for said, between in turns:
                turn, after = self.encode_texts([said, between])
                # A special token that closes turns is in the text between them, and belongs to the turn.
                closing = int(after[:1] == [end])
                given.ids.extend([*turn, *after])
                given.trained.extend([True] * (len(turn) + closing) + [False] * (len(after) - closing))
            (turn,) = self.encode_texts([final])
            given.ids.extend([*turn, end])
            given.trained.extend([True] * (len(turn) + 1))
            found.append(given)
        return found

    def _turns(self, example: Example, response: list[chat.ChatMessage]) -> list[tuple[str, str]]:
        """Return each assistant's turn of a conversation as rendered, and the text between it and the next one."""
        turns: list[tuple[str, str]] = []
        if not self.is_chat:
            for message in response:
                if message["role"] == "assistant":
                    turns.append((message["content"], ""))
                else:
                    said, between = turns[-1]
                    turns[-1] = (said, f"{between}\n\n{message['content']}")
            return turns
        template, before = self.with_arguments(example.arguments), self.messages(example.prompt)
        whole, tools = [*before, *response], example.tools
        full, closing = template.apply(whole, tools), self.tokenizer.decode([self.end_id])
        numbers = [n for n in range(len(before), len(whole)) if whole[n]["role"] == "assistant"]
        starts = []
        for number in numbers:
            opened = template.apply(whole[:number], tools, opens=True)
            if not full.startswith(opened):
                # The template may open a turn with text that earlier turns do not have, such as an empty `<think>`.
                marked = [*whole[:number], {"role": "assistant", "content": chat.MARK}]
                opened = template.apply(marked, tools).partition(chat.MARK)[0]
            if not full.startswith(opened):
                raise UserError(RENDERED_OTHERWISE)
            starts.append(len(opened))
        for number, start, stop in zip(numbers, starts, [*starts[1:], len(full)], strict=True):
            segment, content = full[start:stop], whole[number]["content"]
            end = segment.find(closing)
            # Without a special token that closes turns, the turn ends with its content.
            end = segment.find(content) + len(content) if end < 0 else end
            if content.strip() in segment[:end]:
                turns.append((segment[:end], segment[end:]))
            elif len(numbers) == 1:
                # Such a template removes the reasoning even from the trained turn. The turn's own opening tag is not
                # written twice.
                tag = OPENING.search(template.render(example.prompt, tools))
                if tag and content.lstrip().startswith(tag[1]):
                    content = content.lstrip().removeprefix(tag[1]).removeprefix(tag[0][len(tag[1]) :])
                turns.append((content, ""))
            else:
                raise UserError(RENDERED_OTHERWISE)
        return turns


def retokenized(rows: Rows, generating: Any, own: PromptTemplate) -> Rows:
    """Return identity, length, tokens, action_mask and sequence_lengths of rows in the token ids of a role's own prompt
    template.

    `rows` have tokens of the tokenizer `generating`, prompt_length and metadata, which includes the example's prompt.
    An end of sequence becomes the role's own.
    """
    prompts, answers, endings = [], [], chat.end_of_sequence_ids(generating)
    for number in range(len(rows)):
        about = rows["metadata"][number]
        template = own.with_arguments(about.get(chat.TEMPLATE) or {})
        prompts.append(template.encode(about["prompt"], chat.tools_of(about.get("tools")) or []))
        ids = rows["tokens"][number][int(rows["prompt_length"][number]) :].tolist()
        text = generating.decode(ids, skip_special_tokens=True)
        ends = bool(ids) and ids[-1] in endings
        answers += (template.encode_responses if ends else template.encode_texts)([text])
    parts = (Ragged.from_rows(ids, torch.int64) for ids in (prompts, answers))
    tokens, mask, sequences, length, _ = join_response(*parts)
    identity = {name: rows[name] for name in IDENTITY}
    return Rows({**identity, "length": length, "tokens": tokens, "action_mask": mask, "sequence_lengths": sequences})
