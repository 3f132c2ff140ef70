"""Turns read by the library `renderers`, where it is proven token-exact over turns, and by Braid's own formats
elsewhere.
"""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from braidrl.agents.tool_calls import ToolCall, parse_tool_calls
from braidrl.agents.turns import TurnTemplate, exact_over_turns, proven_reader
from braidrl.data.chat import ChatMessage
from braidrl.data.templates import PromptTemplate
from tests.agents.chat import STYLES, make_chat_tokenizer
from tests.data.shared_cases import QWEN_REPLY, QWEN_TURNS

pytest.importorskip("renderers")
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
# The format of Qwen3: thoughts are kept after the last question alone, and results of tools are a user's message.
QWEN3 = (
    """
{%- if tools %}{{ "<|im_start|>system\n" }}
{%- if messages[0].role == "system" %}{{ messages[0].content + "\n\n" }}{% endif %}
{{- "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n" }}
{{- "You are provided with function signatures within <tools></tools> XML tags:\n<tools>" }}
{%- for tool in tools %}{{ "\n" + (tool | tojson) }}{% endfor %}
{{- "\n</tools>\n\nFor each function call, return a json object with function name and arguments " }}
{{- "within <tool_call></tool_call> XML tags:\n<tool_call>\n" }}
{{- "{\\"name\\": <function-name>, \\"arguments\\": <args-json-object>}\n</tool_call><|im_end|>\n" }}
{%- elif messages[0].role == "system" %}{{ "<|im_start|>system\n" + messages[0].content + "<|im_end|>\n" }}
{%- endif %}"""
    + QWEN_TURNS
    + """
{%- for call in message.tool_calls or [] %}
{%- if not loop.first or content %}{{ "\n" }}{% endif %}
{{- "<tool_call>\n{\\"name\\": \\"" + call.function.name + "\\", " }}
{{- "\\"arguments\\": " + (call.function.arguments | tojson) + "}\n</tool_call>" }}
{%- endfor %}{{ "<|im_end|>\n" }}
{%- elif message.role == "tool" %}
{%- if loop.first or messages[loop.index0 - 1].role != "tool" %}{{ "<|im_start|>user" }}{% endif %}
{{- "\n<tool_response>\n" + message.content + "\n</tool_response>" }}
{%- if loop.last or messages[loop.index0 + 1].role != "tool" %}{{ "<|im_end|>\n" }}{% endif %}
{%- elif not (loop.first and message.role == "system") %}
{{- "<|im_start|>" + message.role + "\n" + message.content + "<|im_end|>\n" }}{% endif %}
{%- endfor %}"""
    + QWEN_REPLY
)
MARKS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]


@pytest.fixture(scope="module")
def qwen3() -> PreTrainedTokenizerFast:
    core = Tokenizer(models.BPE({c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    core.add_tokens([AddedToken(mark, special=False) for mark in MARKS])
    made = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    made.chat_template = QWEN3
    return made


class OwnWay(TurnTemplate):
    """Braid's own rendering, called as the library's."""

    def render_ids(self, messages: list[ChatMessage], *, tools: Any, add_generation_prompt: bool) -> list[int]:
        return self.first(messages, tools or ()).ids

    def bridge_to_next_turn(self, prompt: list[int], sampled: list[int], said: list[ChatMessage], *, tools: Any) -> Any:
        return SimpleNamespace(token_ids=[*prompt, *sampled, *self.following(said, sampled[-1], tools or ()).ids])


@pytest.mark.parametrize("arguments", [{}, {"enable_thinking": False}])
def test_library_and_own_way_are_exact_over_turns(qwen3: PreTrainedTokenizerFast, arguments: dict[str, bool]) -> None:
    template = PromptTemplate(qwen3, arguments=arguments)
    assert exact_over_turns(template, OwnWay(template))
    assert type(proven_reader(template)).__name__ == "Qwen3Renderer"


@pytest.mark.parametrize("style", STYLES)
def test_a_template_that_no_renderer_writes_is_read_by_own_formats(style: str) -> None:
    template = PromptTemplate(make_chat_tokenizer(style))
    assert exact_over_turns(template, OwnWay(template))
    assert proven_reader(template) is None


def test_a_call_inside_reasoning_is_no_call(qwen3: PreTrainedTokenizerFast) -> None:
    call = "<tool_call>\n" + json.dumps({"name": "look", "arguments": {}}) + "\n</tool_call>"
    turns = TurnTemplate(PromptTemplate(qwen3))

    def calls(text: str) -> list[ToolCall]:
        return parse_tool_calls(turns.text(qwen3(text)["input_ids"], [TOOL]))

    assert calls(f"<think>\nI could write {call}.\n</think>\n\nNo.<|im_end|>") == []
    assert calls(f"<think>\nYes.\n</think>\n\n{call}<|im_end|>") == [ToolCall("look", {})]
    (broken,) = calls("<tool_call>\n{look\n</tool_call><|im_end|>")
    assert broken.fault is not None
