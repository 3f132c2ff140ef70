"""Observations, their token ids that continue a conversation, and failures. Earlier turns are never tokenized again.

    ... <start>assistant  I guess 5 <end> | ⏎ <start>user  higher <end> ⏎ <start>assistant ⏎ | I guess 7 <end>
                          sampled           this, tokenised alone                              sampled

The text between two assistant turns comes from the chat template itself: it is rendered with a mark as the assistant's
turn, and the text after the mark follows a turn. So changes of earlier turns by the template, such as removed
reasoning, have no effect.

Calls of tools are found by token ids, by a reader of the library `renderers`, if one is proven to write the chat
template's ids over several turns (`exact_over_turns`); otherwise by the formats of `tool_calls`.
"""

import importlib.util
import json
import logging
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from braidrl.agents.tool_calls import FORMATS, as_text, call_text, format_of, tagged
from braidrl.data.chat import MARK, TRIALS, UNREAD_TOOLS, ChatMessage, Tools, normal_message, special_tokens
from braidrl.data.images import BrokenImage, kept_messages, names_in
from braidrl.errors import UserError

# Environments import this module, and their processes need neither torch nor templates.
if TYPE_CHECKING:
    from braidrl.data.templates import PromptTemplate
    from braidrl.data.vision import ImageSpan

Context = str | list[ChatMessage]
WITHOUT_READER = ("default", "inkling")
"""Renderers that do not know a family's format, or do not continue conversations."""


class SeenIds(NamedTuple):
    """Token ids, and the images of some of them."""

    ids: list[int]
    images: "Sequence[ImageSpan]" = ()


@dataclass(frozen=True)
class TurnTemplate:
    """The tokeniser of contexts and observations, with the run's tokenizer and chat template."""

    template: "PromptTemplate"
    tool_format: str | None = None
    """The model's format of tool calls, of `tool_calls.FORMATS`; by default that of the tokenizer's chat template."""
    hidden: frozenset[int] | None = None
    """Tokens that the text of a turn omits; None means all special ones."""

    def first(self, context: Context, tools: Tools = ()) -> SeenIds:
        """Tokenize a full context. Raises UserError for malformed tool calls, or if the chat template refuses it."""
        if tools and not self.template.shows_tools:
            warn_of_unread_tools()
        messages = self.kept(context)
        return self.expanded(self.template.encode(messages, tools), messages)

    def kept(self, context: Context) -> Context:
        """Return messages in the form for templates, with their images in the run's store.

        Raises UserError for a broken image, and for images with a text-only model.
        """
        if isinstance(context, str):
            return context
        vision, messages = self.template.vision, [*map(normal_message, context)]
        if vision is None:
            if any(isinstance(message.get("content"), list) and message["content"] for message in messages):
                raise UserError("a message has parts that are no text, and the model reads text; take one that sees")
            return messages
        try:
            # An environment or an agent may not make this process fetch an address.
            stored: list[ChatMessage] = kept_messages(messages, replace(vision.store, fetches=False), Path.cwd())
        except BrokenImage as error:
            raise UserError(str(error)) from None
        return stored

    def expanded(self, ids: list[int], messages: Context) -> SeenIds:
        return SeenIds(*self.template.expand(ids, names_in(messages)))

    def following(self, context: Context, last_token: int, tools: Tools = ()) -> SeenIds:
        """Return the token ids from a turn's last token to the next turn.

        Raises UserError if the chat template refuses the messages.
        """
        messages = self.kept(context)
        messages = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
        if not self.template.is_chat:
            text = "\n\n".join(map(self.template.plain_text, messages))
            return self.expanded(self.template.encode_texts([text])[0], messages)
        turn = [{"role": "user", "content": "-"}, {"role": "assistant", "content": MARK}]
        after = self.template.apply([*turn, *messages], tools, opens=True).partition(MARK)[2]
        if MARK in after:
            raise UserError(
                f"an environment returned {MARK!r}, which stands for the assistant's turn; return another text"
            )
        # The turn's end is not written twice, if it was sampled; Llama 2's template has a space before it.
        end = special_tokens(self.template.tokenizer).get(last_token)
        if end and after.lstrip().startswith(end):
            after = after.lstrip().removeprefix(end)
        return self.expanded(self.template.encode_texts([after])[0], messages)

    def text(self, tokens: Sequence[int], tools: Tools = ()) -> str:
        """Decode sampled tokens for an environment or a client, without `hidden` ones; with `tools`, calls are in
        Hermes' format.
        """
        tokenizer, ids = self.template.tokenizer, list(tokens)
        decode = partial(tokenizer.decode, clean_up_tokenization_spaces=False)
        special = special_tokens(tokenizer)
        hidden = special.keys() if self.hidden is None else self.hidden
        plain: str = decode([token for token in ids if token not in hidden], skip_special_tokens=self.hidden is None)
        if not tools:
            return plain
        if self.tool_format is None and (reader := proven_reader(self.template)) is not None:
            try:
                parsed = reader.parse_response(ids, tools=list(tools), prompt_ids=self.template.encode("-", tools))
            except Exception as error:  # of any kind: a reader may reject the model's text
                return tagged([f"{type(error).__name__}: {error}"])
            hermes_calls = []
            for call in parsed.tool_calls:
                is_whole = isinstance(call.arguments, dict) and call.name
                hermes_calls.append(written(call.name, call.arguments) if is_whole else call.raw)
            before = min((c.token_span[0] for c in parsed.tool_calls if c.token_span is not None), default=len(ids))
            # Text that only looks like a call, in reasoning or as plain text, must not reach the environment as one.
            before_calls = decode(ids[:before], skip_special_tokens=False).replace("<tool_call>", "<tool call>")
            calls = tagged(hermes_calls)
        elif re.search(r"<tool_call>\s*\{", plain):
            return plain  # most models write calls in Hermes' format; these stay unchanged
        else:
            while ids and ids[-1] in special:
                ids.pop()
            rewritten = self._rewritten(decode(ids, skip_special_tokens=False), tools)
            if rewritten is None:
                return plain
            before_calls, calls = rewritten
        for number in hidden:
            before_calls = before_calls.replace(special.get(number) or "\0", "")
        return before_calls + calls

    def _rewritten(self, text: str, tools: Tools) -> tuple[str, str] | None:
        """Return the text before a turn's calls, and the calls in Hermes' format; None if there are none."""
        tokenizer = self.template.tokenizer
        if self.tool_format is not None:
            return FORMATS[self.tool_format].rewritten(text, tools)
        if getattr(tokenizer, "response_template", None) is None:
            return format_of(tokenizer.chat_template if self.template.is_chat else None).rewritten(text, tools)
        prompt = self.template.render("-", tools)
        try:
            message = tokenizer.parse_response(text, prefix=prompt, tools=list(tools))
        except Exception as error:  # of any kind: the model's text violates its format
            return "", tagged([f"{type(error).__name__}: {error}"])
        functions = [call["function"] for call in message.get("tool_calls") or []]
        calls = [written(str(function["name"]), function["arguments"]) for function in functions]
        return (message.get("content") or "", tagged(calls)) if calls else None


def written(name: str, arguments: Any) -> str:
    """Return a call as text, or why its arguments cannot be written, which the model reads as an error."""
    try:
        return call_text(name, as_text(arguments))
    except ValueError as error:
        return f"the arguments of {name}: {error}"


@cache
def warn_of_unread_tools() -> None:
    """Log, once per process, that the model's prompt lacks the tools of an environment or agent."""
    logging.getLogger(__name__).warning(f"{UNREAD_TOOLS}: name them in the system prompt, or set another template")


def exact_over_turns(template: "PromptTemplate", reader: Any) -> bool:
    """Return True if a renderer produces the chat template's ids for prompts, and for what follows each turn of some
    conversations.
    """
    closing = template.tokenizer.decode([template.end_id])
    for messages, tools in TRIALS:
        turns = [n for n, message in enumerate(messages) if message["role"] == "assistant"]
        opening = messages[: turns[0]] if turns else messages
        ids, named = template.encode(opening, tools), list(tools) or None
        if list(reader.render_ids(opening, tools=named, add_generation_prompt=True)) != ids:
            return False
        for turn, following in zip(turns, [*turns, len(messages)][1:], strict=True):
            # A mark replaces each turn, since templates may render earlier turns differently.
            marked = {**messages[turn], "content": MARK}
            rendered = template.apply([*messages[:turn], marked, *messages[turn + 1 : following]], tools, opens=True)
            calls, _, between = rendered.partition(MARK)[2].partition(closing)
            sampled, expected = template.encode_texts([f"{messages[turn]['content']}{calls}{closing}", between])
            bridged = reader.bridge_to_next_turn(ids, sampled, messages[turn + 1 : following], tools=named)
            ids = [*ids, *sampled, *expected]
            if bridged is None or list(bridged.token_ids) != ids:
                return False
    return True


def proven_reader(template: "PromptTemplate") -> Any | None:
    """Return the library's renderer that is exact over turns for a chat template; None if there is none."""
    if not template.is_chat or importlib.util.find_spec("renderers") is None:
        return None
    return _proven(template.tokenizer, json.dumps(dict(template.arguments), sort_keys=True))


@lru_cache(maxsize=8)
def _proven(tokenizer: Any, arguments: str) -> Any | None:
    # Imported here: the library is optional, and takes a second to import.
    from pydantic import TypeAdapter
    from renderers import RendererConfig, create_renderer, merge_chat_template_kwargs
    from renderers.base import RENDERER_REGISTRY, _populate_registry

    from braidrl.data.templates import PromptTemplate

    _populate_registry()
    template, kinds = PromptTemplate(tokenizer, arguments=json.loads(arguments)), TypeAdapter(RendererConfig)
    for name in sorted(set(RENDERER_REGISTRY).difference(WITHOUT_READER)):
        try:
            config = kinds.validate_python({"name": name, "thinking_retention": "all"})
            reader = create_renderer(tokenizer, merge_chat_template_kwargs(config, template.arguments))
            if exact_over_turns(template, reader):
                return reader
        except Exception:  # of any kind: this family's tokens or arguments do not match the tokenizer
            continue
    return None


@dataclass(frozen=True)
class Observation:
    """An environment's answer to one turn of the model."""

    said: Context = ""
    """Text, or messages such as tool results, to append; with `restart` the complete next context."""
    reward: float = 0.0
    """This turn's reward; a row's score is the sum over its turns."""
    done: bool = False
    correct: bool | None = None
    """True if the task was solved; by default derived from the score of a right answer."""
    restart: bool = False
    """`said` replaces the complete context. It is appended if it extends the context's tokens; otherwise it opens a new
    sequence.
    """
    policy: str | None = None
    """The role that takes the next turn and reads `said`; by default the role of the last turn."""
    rewards: Mapping[str, float] = field(default_factory=dict)
    """Rewards of other roles, each for its last turn: `reward` is that of the role that has just acted."""

    def __post_init__(self) -> None:
        """Raise ValueError for a reward that is not finite, and TypeError for a context that is neither text nor
        messages, or for rewards or a policy of another form.
        """
        check_context(self.said)
        if not (self.policy is None or isinstance(self.policy, str)) or not isinstance(self.rewards, Mapping):
            raise TypeError(f"`policy` names a role, and `rewards` give each role a number: {self}")
        for role, reward in {"turn": self.reward, **self.rewards}.items():
            if isinstance(reward, bool) or not isinstance(role, str):
                raise TypeError(f"`rewards` give each role a number, not {self.rewards!r}")
            if not math.isfinite(reward):
                raise ValueError(f"the reward of a turn must be a finite number, got {reward}")


def check_context(context: object) -> None:
    """Raise TypeError for a value other than text or messages."""
    if isinstance(context, str):
        return
    if not isinstance(context, list) or not all(
        isinstance(m, dict) and isinstance(m.get("role"), str) for m in context
    ):
        raise TypeError(f"an environment returns text or messages {{role, content}}, not {context!r}")


class EnvironmentFailed(Exception):
    """A failure of the environment, which raised or did not answer in time. It ends only this trajectory."""

    def __init__(self, reason: str, detail: str, killed: bool = False) -> None:
        """Record the reason; `killed` if the process was killed externally, and the trajectory is played again."""
        super().__init__(f"{reason}: {detail}")
        self.reason, self.detail, self.killed = reason, detail, killed


def outcome_of(returned: Any) -> Observation:
    """Return an agent's score as an Observation. Raises EnvironmentFailed for other values."""
    if isinstance(returned, Observation):
        return returned
    try:
        return Observation(reward=float(returned))
    except (TypeError, ValueError):
        raise EnvironmentFailed("TypeError", f"the agent returned {returned!r}, which is no score") from None
