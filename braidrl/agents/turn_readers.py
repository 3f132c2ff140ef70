"""Readers of models' turns from the library `renderers`, used where they are proven to write a chat template's ids over several turns.

chat template ──conversations──▶ ids ──────────────┐
prompt, then what follows each turn ───────────────┴─ equal? ──▶ the reader of this family finds calls by token ids
                                                               else Braid's own `tool_calls` does

Braid's own way of continuing a conversation passes the same check (`exact_over_turns`).
"""

import importlib.util
import json
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

from braidrl.data.chat import ChatMessage, Tools
from braidrl.data.endings import MARK
from braidrl.data.rendering import TRIALS
from braidrl.data.templates import PromptTemplate

First = Callable[[list[ChatMessage], Tools], list[int]]
"""Returns the ids of a prompt, with the assistant's turn opened."""
Follow = Callable[[list[int], list[int], list[ChatMessage], Tools], list[int] | None]
"""Returns the ids after a prompt and a sampled turn up to the next turn, given the messages between; None if it cannot."""
WITHOUT_READER = ("default", "inkling")
"""Renderers that do not know a family's format, or do not continue conversations."""


def exact_over_turns(template: PromptTemplate, first: First, follow: Follow) -> bool:
    """Return True if prompts, and what follows each turn of some conversations, have the ids of the chat template's rendering."""
    closing = template.tokenizer.decode([template.end_id])
    for messages, tools in TRIALS:
        turns = [n for n, message in enumerate(messages) if message["role"] == "assistant"]
        opening = messages[: turns[0]] if turns else messages
        ids = template.encode(opening, tools)
        if first(opening, tools) != ids:
            return False
        for turn, following in zip(turns, [*turns, len(messages)][1:], strict=True):
            # A mark stands for each turn, since templates may render earlier turns otherwise.
            marked = {**messages[turn], "content": MARK}
            rendered = template.apply([*messages[:turn], marked, *messages[turn + 1 : following]], tools, opens=True)
            calls, _, between = rendered.partition(MARK)[2].partition(closing)
            sampled, expected = template.encode_texts([f"{messages[turn]['content']}{calls}{closing}", between])
            if follow(ids, sampled, messages[turn + 1 : following], tools) != expected:
                return False
            ids = [*ids, *sampled, *expected]
    return True


def proven_reader(template: PromptTemplate) -> Any | None:
    """Return the library's renderer that is exact over turns for a chat template; None without one, or without the library."""
    if not template.is_chat or importlib.util.find_spec("renderers") is None:
        return None
    return _proven(template.tokenizer, json.dumps(dict(template.arguments), sort_keys=True))


@lru_cache(maxsize=8)
def _proven(tokenizer: Any, arguments: str) -> Any | None:
    # Imported here: the library is optional, and takes a second to import.
    from pydantic import TypeAdapter
    from renderers import RendererConfig, create_renderer, merge_chat_template_kwargs
    from renderers.base import RENDERER_REGISTRY, _populate_registry

    _populate_registry()
    template, kinds = PromptTemplate(tokenizer, arguments=json.loads(arguments)), TypeAdapter(RendererConfig)
    for name in sorted(set(RENDERER_REGISTRY).difference(WITHOUT_READER)):
        try:
            config = kinds.validate_python({"name": name, "thinking_retention": "all"})
            found = create_renderer(tokenizer, merge_chat_template_kwargs(config, template.arguments))
            if exact_over_turns(template, partial(prompt_by, found), partial(continuation_by, found)):
                return found
        except Exception:  # of any kind: this family's tokens or arguments are not the tokenizer's
            continue
    return None


def prompt_by(renderer: Any, messages: list[ChatMessage], tools: Tools) -> list[int]:
    """Return the ids of a prompt as the library's renderer writes them."""
    return list(renderer.render_ids(messages, tools=list(tools) or None, add_generation_prompt=True))


def continuation_by(
    renderer: Any, prompt: list[int], sampled: list[int], said: list[ChatMessage], tools: Tools
) -> list[int] | None:
    """Return the ids after a prompt and a sampled turn as the library's renderer writes them."""
    found = renderer.bridge_to_next_turn(prompt, sampled, said, tools=list(tools) or None)
    return None if found is None else list(found.token_ids)[len(prompt) + len(sampled) :]
