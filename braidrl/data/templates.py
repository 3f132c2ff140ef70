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

from braidrl.algorithms.ragged import Ragged, join_response
from braidrl.config import DataConfig
from braidrl.data import chat
from braidrl.data.conversations import Prompt, Response
from braidrl.data.images import names_in
from braidrl.data.records import whole_text
from braidrl.data.rows import IDENTITY, Rows
from braidrl.data.sources import Example
from braidrl.data.vision import ImageSpan, Vision, untrained_images
from braidrl.deferred import torch
from braidrl.errors import UserError, located

RENDERED_OTHERWISE = (
    "the chat template renders earlier turns otherwise once the conversation continues, such as without their "
    "reasoning; write train_on: last"
)
OPENING = re.compile(r"(<[^<>/\s]+>)\s*\Z")
"""A tag at the end of the text that opens a turn, such as `<think>`."""


class Given(NamedTuple):
    """A given response as token ids, the mask of trained ones, and its images."""

    ids: list[int]
    trained: list[bool]
    images: Sequence[ImageSpan] = ()


class Turn(NamedTuple):
    """A rendered assistant's turn, and the text between it and the next turn."""

    said: str
    after: str = ""
    is_trained: bool = True


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
    vision: Vision | None = None
    """The image processor of a model that sees."""

    @staticmethod
    def of(tokenizer: Any, data: DataConfig, vision: Vision | None = None) -> "PromptTemplate":
        """Return the template that a configuration describes. Raises UserError for reserved arguments."""
        with located("data.template"):
            chat.template_arguments(data.template)
        return PromptTemplate(tokenizer, data.chat_template, data.system_prompt, data.template, vision)

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
    def opening_tag(self) -> str:
        """Return the tag, such as `<think>`, that the template opens in an assistant's turn; empty text without one."""
        if not self.is_chat:
            return ""
        messages, _ = chat.TRIALS[0]
        try:
            tag = OPENING.search(self.apply(messages, opens=True))
            head = tag and self.apply([*messages, {"role": "assistant", "content": chat.MARK}]).partition(chat.MARK)[0]
        except UserError:  # the template refuses this conversation; of others nothing is known
            return ""
        # The tag may be the name of the role, which a given turn has too.
        return tag[1] if tag and not str(head).rstrip().endswith(tag[1]) else ""

    def unread(self, role: str, field: str, value: Any) -> bool:
        """Return True if the chat template writes a message with a field as it does without."""
        before = [] if role in ("system", "user") else [{"role": "user", "content": "a"}]
        message: chat.ChatMessage = {"role": role, "content": "a"}
        try:
            return self.is_chat and self.apply([*before, {**message, field: value}]) == self.apply([*before, message])
        except UserError:
            return False

    @cached_property
    def unread_arguments(self) -> list[str]:
        """Return the names of the arguments that the chat template does not read."""
        template = self.tokenizer.chat_template if self.is_chat else ""
        if not self.arguments or not isinstance(template, str):
            return []
        # Imported here: transformers imports it when it first renders a template.
        from jinja2 import TemplateSyntaxError, meta
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        environment = ImmutableSandboxedEnvironment(extensions=["jinja2.ext.loopcontrols"])
        try:
            names = meta.find_undeclared_variables(environment.parse(template))
        except TemplateSyntaxError:  # a tag that only transformers knows, such as `generation`
            return []
        return [name for name in self.arguments if name not in names]

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
            return "\n\n".join(map(self.plain_text, messages))
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

    def plain_text(self, message: chat.ChatMessage) -> str:
        """Return a message's content without a chat template, with a placeholder for each image."""
        content, mark = message["content"], self.vision.placeholder if self.vision else ""
        return content if isinstance(content, str) else "".join(part.get("text", mark) for part in content)

    def expand(self, ids: list[int], images: Sequence[str]) -> tuple[list[int], list[ImageSpan]]:
        """Return ids with each image's placeholder replaced by its tokens, and the images' positions.

        Raises UserError for another number of placeholders.
        """
        return self.vision.expand(ids, images) if self.vision else (ids, [])

    def apply(self, messages: Sequence[chat.ChatMessage], tools: chat.Tools = (), opens: bool = False) -> str:
        """Render messages, with `opens` up to the assistant's turn.

        Raises UserError if the template refuses, fails or breaks a limit.
        """
        settings = {"tools": list(tools) or None, "tokenize": False, "add_generation_prompt": opens, **self.arguments}
        try:
            with chat.WATCH:
                text: str = self.tokenizer.apply_chat_template([*map(chat.for_template, messages)], **settings)
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
        ids_of_texts, bos = [], self.tokenizer.bos_token_id
        for ids in encoded if begins else ():
            ids = ids[: len(ids) - self._appended]
            while bos is not None and ids[:2] == [bos, bos]:
                ids = ids[1:]
            ids_of_texts.append(ids)
        return ids_of_texts if begins else encoded

    @cached_property
    def _appended(self) -> int:
        """Return the number of special tokens that the tokenizer appends to a text."""
        plain, marked = (self.tokenizer("a", add_special_tokens=special)["input_ids"] for special in (False, True))
        ends = [end for end in range(len(plain), len(marked) + 1) if marked[end - len(plain) : end] == plain]
        return len(marked) - ends[-1] if ends else 0

    def encode(self, prompt: Prompt, tools: chat.Tools = ()) -> list[int]:
        """Tokenise one prompt. Raises UserError if the chat template refuses the messages."""
        return self.encode_texts([self.render(prompt, tools)], begins=not self.is_chat)[0]

    def encode_responses(self, responses: Sequence[str]) -> list[list[int]]:
        """Tokenise given responses, each with one end of sequence. Raises UserError if the tokenizer has none."""
        end = self.end_id
        encoded = self.encode_texts(responses)
        return [ids if ids and ids[-1] in (end, self.tokenizer.eos_token_id) else [*ids, end] for ids in encoded]

    def encode_given(self, example: Example, responses: Sequence[Response], opened: str) -> tuple[str, list[Given]]:
        """Tokenise an example's responses: texts, or messages whose answers are trained.

        `opened` is the rendered prompt. Return the prompt before all of the responses, and the responses: where the
        template opens a turn with a tag that it writes only around reasoning, and a response has none, the prompt ends
        before the tag. Raises UserError for a turn that the template renders otherwise.
        """
        begins, turns_of = [], []
        for response in responses:
            begin, turns = self._turns(example, response, opened)
            begins.append(begin)
            turns_of.append(turns)
        prompt = min(begins, key=len, default=opened)
        if not all(begin.startswith(prompt) for begin in begins):
            raise UserError(RENDERED_OTHERWISE)
        encoded = []
        for response, begin, turns in zip(responses, begins, turns_of, strict=True):
            ids, trained, _ = self._encode_turns(begin[len(prompt) :], turns)
            expanded, spans = self.expand(ids, names_in(response))
            encoded.append(Given(expanded, untrained_images(trained, spans), spans))
        return prompt, encoded

    def _encode_turns(self, begin: str, turns: Sequence[Turn]) -> Given:
        """Tokenise the turns of a response, whose first one continues the text `begin`."""
        encoded, end = Given([], []), self.end_id
        for number, turn in enumerate(turns):
            turn_ids, after = self.encode_texts([turn.said if number else begin + turn.said, turn.after])
            is_last = number == len(turns) - 1
            if is_last:
                ended = turn_ids and turn_ids[-1] in (end, self.tokenizer.eos_token_id)
                after = [] if ended else [end]
            # A special token that closes turns is in the text between them, and belongs to the turn.
            closing = int(after[:1] == [end])
            encoded.ids.extend([*turn_ids, *after])
            encoded.trained.extend([turn.is_trained] * (len(turn_ids) + closing) + [False] * (len(after) - closing))
        return encoded

    def _turns(self, example: Example, response: Response, opened: str) -> tuple[str, list[Turn]]:
        """Return the prompt before a response, and the response's turns."""
        if isinstance(response, str):
            return self._text_turn(example, response, opened)
        turns: list[Turn] = []
        if not self.is_chat:
            for message in response:
                if message["role"] == "assistant":
                    if message.get("tool_calls"):
                        raise UserError("a call of a tool has no text without a chat template; set chat_template: true")
                    turns.append(Turn(message["content"], "", chat.is_trained(message)))
                else:
                    turns[-1] = turns[-1]._replace(after=f"{turns[-1].after}\n\n{message['content']}")
            return opened, turns
        template, before = self.with_arguments(example.arguments), self.messages(example.prompt)
        conversation, tools = [*before, *response], example.tools
        full, closing = template.apply(conversation, tools), self.tokenizer.decode([self.end_id])
        numbers = [n for n in range(len(before), len(conversation)) if conversation[n]["role"] == "assistant"]
        starts, begin = [], opened
        for number in numbers:
            is_prompt = number == len(before) and before[-1]["role"] != "assistant"
            written = opened if is_prompt else template.apply(conversation[:number], tools, opens=True)
            if not full.startswith(written):
                # The template may open a turn with text that earlier turns do not have, such as an empty `<think>`.
                marked = [*conversation[:number], {"role": "assistant", "content": chat.MARK}]
                written = template.apply(marked, tools).partition(chat.MARK)[0]
            if not full.startswith(written):
                raise UserError(RENDERED_OTHERWISE)
            starts.append(len(written))
        if template.opening_tag and opened.startswith(full[: starts[0]]):
            begin = full[: starts[0]]
        for number, start, stop in zip(numbers, starts, [*starts[1:], len(full)], strict=True):
            segment, content = full[start:stop], conversation[number]["content"]
            end = segment.find(closing)
            if end < 0:
                end = self._other_end(segment, content, template.apply(conversation[: number + 1], tools)[start:])
            trained = chat.is_trained(conversation[number])
            if trained and (unread := unread_part(conversation[number], segment[:end])):
                raise UserError(
                    RENDERED_OTHERWISE
                    if len(numbers) > 1 and not template.unread("assistant", unread, conversation[number][unread])
                    else f"the chat template does not write {unread!r} of a trained message; take a model whose "
                    "template does, or move it into `content` by a `convert` of your own"
                )
            if content.strip() in segment[:end] or not trained:
                turns.append(Turn(segment[:end], segment[end:], trained))
            elif conversation[number].get("tool_calls"):
                raise UserError(
                    "the chat template writes a call of a tool without the message's 'content'; take a model whose "
                    "template has both, or move the text into a message before it by a `convert` of your own"
                )
            elif len(numbers) == 1:
                # Such a template removes the reasoning even from the trained turn: its text is the data's own.
                return opened, [Turn(template._behind_tag(content, opened))]
            else:
                raise UserError(RENDERED_OTHERWISE)
        return begin, turns

    def _other_end(self, segment: str, content: str, alone: str) -> int:
        """Return the end of a turn that the token of a last turn does not close, as in gpt-oss's form, where a call
        and an earlier answer have end tokens of their own. `alone` is the turn as the last one.

        Without such a token the turn ends with its content.
        """
        differing = (n for n, (one, other) in enumerate(zip(segment, alone, strict=False)) if one != other)
        shared = next(differing, min(len(segment), len(alone)))
        texts = [text for text in (content, content.strip()) if text.strip()]
        ends = [at + len(text) for text in texts if (at := segment.rfind(text, 0, shared)) >= 0]
        end = ends[0] if ends else shared
        closed = self._closing and self._closing.match(segment, end)
        return closed.end(1) if closed else end

    @cached_property
    def _closing(self) -> re.Pattern[str] | None:
        """A special token with another one behind it: it closes a turn, and the other one opens the next."""
        special = chat.special_text(self.tokenizer)
        return special and re.compile(rf"({special.pattern})(?=\s*(?:{special.pattern}))")

    def _text_turn(self, example: Example, text: str, opened: str) -> tuple[str, list[Turn]]:
        """Return the prompt before a response that is text, and the response's only turn.

        If the template opens the turn with a tag, the text's own opening tag is not written twice, and a text without
        the closing tag is written as the template writes an answer without reasoning.
        """
        template = self.with_arguments(example.arguments)
        tag = template.opening_tag
        if tag and opened.rstrip().endswith(tag) and f"</{tag[1:]}" not in text:
            return self._turns(example, [{"role": "assistant", "content": text}], opened)
        return opened, [Turn(template._behind_tag(text, opened))]

    def _behind_tag(self, text: str, opened: str) -> str:
        """Return a response without the tag that the template has opened already."""
        tag, space = self.opening_tag, opened[len(opened.rstrip()) :]
        if not tag or not opened.rstrip().endswith(tag) or not text.lstrip().startswith(tag):
            return text
        return text.lstrip().removeprefix(tag).removeprefix(space)


def unread_part(message: chat.ChatMessage, text: str) -> str | None:
    """Return the field of a message that a rendered turn lacks: its reasoning or its calls."""
    for name in chat.REASONING:
        reasoning = message.get(name)
        if isinstance(reasoning, str) and reasoning.strip() not in text:
            return name
    calls = (call.get("function", call) for call in message.get("tool_calls", ()))
    return None if all(str(call.get("name")) in text for call in calls) else "tool_calls"


def retokenized(rows: Rows, generating: Any, of_role: PromptTemplate) -> Rows:
    """Return identity, length, tokens, action_mask and sequence_lengths of rows in the token ids of a role's own prompt
    template.

    `rows` have tokens of the tokenizer `generating`, prompt_length and metadata, which includes the example's prompt.
    An end of sequence becomes the role's own.
    """
    prompts, answers, endings = [], [], chat.end_of_sequence_ids(generating)
    for number in range(len(rows)):
        about = rows["metadata"][number]
        template = of_role.with_arguments(about.get(chat.TEMPLATE) or {})
        prompts.append(template.encode(about["prompt"], chat.tools_of(about.get("tools")) or []))
        ids = rows["tokens"][number][int(rows["prompt_length"][number]) :].tolist()
        text = generating.decode(ids, skip_special_tokens=True)
        ends = bool(ids) and ids[-1] in endings
        answers += (template.encode_responses if ends else template.encode_texts)([text])
    parts = (Ragged.from_rows(ids, torch.int64) for ids in (prompts, answers))
    tokens, mask, sequences, length, _ = join_response(*parts)
    identity = {name: rows[name] for name in IDENTITY}
    return Rows({**identity, "length": length, "tokens": tokens, "action_mask": mask, "sequence_lengths": sequences})
