"""Observations, and their token ids that continue a conversation, or failures. What was said before is never tokenised again.

    ... <start>assistant  I guess 5 <end> | ⏎ <start>user  higher <end> ⏎ <start>assistant ⏎ | I guess 7 <end>
                          sampled           this, tokenised alone                              sampled

The text between two assistant turns is taken from the chat template itself: it is rendered around a mark in the assistant's
place, and what follows the mark is what follows a turn. So it does not matter what the template does to earlier turns, such as
leaving their reasoning out.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from braidrl.agents.tool_calls import FORMATS, Tools, call_text, calls_of_hermes, format_of
from braidrl.data.sources import ChatMessage
from braidrl.errors import UserError

# This is what environments import, whose processes have no need of torch, nor of templates.
if TYPE_CHECKING:
    from braidrl.data.templates import PromptTemplate

Context = str | list[ChatMessage]
"""Text, or chat messages."""
MARK = "the-assistants-turn-stands-here"


@dataclass(frozen=True)
class TurnTemplate:
    """Turns contexts and observations into token ids with the run's tokenizer and template."""

    template: "PromptTemplate"
    tool_format: str | None = None
    """How the model writes calls of tools, one of `tool_calls.FORMATS`; by default what its tokenizer says."""

    def first(self, context: Context, tools: Tools = ()) -> list[int]:
        """Tokenise a whole context. Raises UserError when the chat template refuses it."""
        if not self.template.is_chat:
            return self.template.encode(context)
        return self.template.encode_text([self._render(self.template.messages(context), tools)])[0]

    def following(self, said: Context, last_token: int, tools: Tools = ()) -> list[int]:
        """Return the token ids between a sampled turn, whose last token is given, and the beginning of the next one.

        Raises UserError when the chat template refuses the messages.
        """
        messages = [{"role": "user", "content": said}] if isinstance(said, str) else said
        if not self.template.is_chat:
            return self._alone("\n\n".join(message["content"] for message in messages))
        turn = [{"role": "user", "content": "-"}, {"role": "assistant", "content": MARK}]
        after = self._render([*turn, *messages], tools).partition(MARK)[2]
        if MARK in after:
            raise UserError(f"an environment says {MARK!r}, which stands for the assistant's turn; say something else")
        return self._alone(self._behind(after, last_token))

    def plain(self, text: str, last_token: int | None) -> list[int]:
        """Tokenise a text that is no chat, which opens a sequence, or goes on behind a sampled turn, whose last token is given."""
        return self.template.encode_plain(text) if last_token is None else self._alone(self._behind(text, last_token))

    def _behind(self, text: str, last_token: int) -> str:
        """Return what is to be tokenised of a text behind a turn: without the end of the turn, where that was sampled."""
        if last_token not in self.template.tokenizer.all_special_ids:
            return text
        return text.removeprefix(self.template.tokenizer.decode([last_token], skip_special_tokens=False))

    def text(self, tokens: Sequence[int], tools: Tools = ()) -> str:
        """Decode sampled tokens for an environment or a client, without special tokens; with `tools`, calls are as Hermes writes them."""
        plain = self._decoded(tokens, special=False)
        # Most models write calls as Hermes does, which then stay to the letter.
        rewritten = self._calls(tokens, tools) if tools and not calls_of_hermes(plain) else None
        if rewritten is None:
            return plain
        said, calls = rewritten
        for special in self.template.tokenizer.all_special_tokens:
            said = said.replace(special, "")
        return said + calls

    def _decoded(self, tokens: Sequence[int], special: bool) -> str:
        decode = self.template.tokenizer.decode
        text: str = decode(list(tokens), skip_special_tokens=not special, clean_up_tokenization_spaces=False)
        return text

    def _calls(self, tokens: Sequence[int], tools: Tools) -> tuple[str, str] | None:
        """Return what stands before the calls of a turn, and the calls; None where there are none."""
        tokenizer, ends = self.template.tokenizer, len(tokens)
        while ends and tokens[ends - 1] in tokenizer.all_special_ids:
            ends -= 1
        text = self._decoded(tokens[:ends], special=True)
        if self.tool_format is not None:
            return FORMATS[self.tool_format].rewritten(text, tools)
        if getattr(tokenizer, "response_template", None) is not None:
            return parsed_by_tokenizer(tokenizer, text, self._render([{"role": "user", "content": "-"}], tools), tools)
        return format_of(tokenizer.chat_template if self.template.is_chat else None).rewritten(text, tools)

    def _alone(self, text: str) -> list[int]:
        """Tokenise text in the middle of a sequence: no special tokens are put before it."""
        return list(self.template.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def _render(self, messages: list[ChatMessage], tools: Tools) -> str:
        from braidrl.data.rendering import render_chat

        return render_chat(self.template.tokenizer, messages, tools)


def parsed_by_tokenizer(tokenizer: Any, text: str, prompt: str, tools: Tools) -> tuple[str, str] | None:
    """Return what stands before the calls of a turn, and the calls, by the tokenizer's own description of responses (transformers)."""
    try:
        message = tokenizer.parse_response(text, prefix=prompt, tools=list(tools))
    except Exception as error:  # of whatever kind: the model has written what its own format does not allow
        return "", f"<tool_call>{type(error).__name__}: {error}</tool_call>"
    found = [call["function"] for call in message.get("tool_calls") or []]
    calls = [call_text(str(each["name"]), json.dumps(each["arguments"])) for each in found]
    said = message.get("content") or ""
    return (said, "".join(f"<tool_call>{call}</tool_call>" for call in calls)) if calls else None


@dataclass(frozen=True)
class Observation:
    """An environment's answer to one turn of the model."""

    said: Context = ""
    """Text, or messages such as tool results, to be appended; with `restart` the whole next context."""
    reward: float = 0.0
    """This turn's reward; a row's score is the sum over its turns."""
    done: bool = False
    correct: bool | None = None
    """Whether the task was solved; by default whether the score is that of a right answer."""
    restart: bool = False
    """`said` replaces the whole context. Where it extends that token by token it is appended, else it opens a new sequence."""

    def __post_init__(self) -> None:
        """Raise ValueError for a reward that is not a finite number, and TypeError for a context that is neither text nor messages."""
        check_context(self.said)
        if not math.isfinite(self.reward):
            raise ValueError(f"the reward of a turn must be a finite number, got {self.reward}")


def check_context(said: object) -> None:
    """Raise TypeError for anything but text or messages."""
    if isinstance(said, str):
        return
    if not isinstance(said, list) or not all(isinstance(m, dict) and isinstance(m.get("role"), str) for m in said):
        raise TypeError(f"an environment says text or messages {{role, content}}, not {said!r}")


class EnvironmentFailed(Exception):
    """The environment raised, or did not answer in time: this ends its trajectory and no other."""

    def __init__(self, reason: str, detail: str, killed: bool = False) -> None:
        """`killed` where somebody else has ended its process: the trajectory is played once more."""
        super().__init__(f"{reason}: {detail}")
        self.reason, self.detail, self.killed = reason, detail, killed


def outcome_of(returned: Any) -> Observation:
    """Return an agent's score as an Observation. Raises EnvironmentFailed for anything else."""
    if isinstance(returned, Observation):
        return returned
    try:
        return Observation(reward=float(returned))
    except (TypeError, ValueError):
        raise EnvironmentFailed("TypeError", f"the agent returned {returned!r}, which is no score") from None
