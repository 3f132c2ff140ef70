"""Inputs from public reports, which are stored beside the checkout, and chat templates of public models."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

FOLDER = Path(__file__).parents[3] / "shared" / "cases"
needs_cases = pytest.mark.skipif(not FOLDER.is_dir(), reason="the shared cases are not beside this checkout")

# Calls are written by `tojson`, as in Hermes and Qwen, or by a loop over the arguments.
CALLS = {
    "tojson": '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}',
    "items": (
        "{{ call.function.name }}({% for name, value in call.function.arguments.items() %}{{ name }}={{ value }};{% "
        "endfor %})"
    ),
}
# As in Qwen3: an empty thought before the last answer, none in earlier ones, and reasoning only after the last
# question.
QWEN_TURNS = """
{%- set ns = namespace(last=-1) %}
{%- for message in messages %}{% if message.role == "user" %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for message in messages %}
{%- if message.role == "assistant" %}
{%- set content = message.content.split("</think>")[-1].lstrip("\n") %}
{%- set thought = message.content.split("</think>")[0].split("<think>")[-1].strip("\n")
    if "</think>" in message.content else "" %}
{{- "<|im_start|>assistant\n" }}
{%- if loop.index0 > ns.last and (loop.last or thought) %}{{ "<think>\n" + thought + "\n</think>\n\n" }}{% endif %}
{{- content }}"""
QWEN_REPLY = """
{%- if add_generation_prompt %}{{ "<|im_start|>assistant\n" }}
{%- if enable_thinking is defined and not enable_thinking %}{{ "<think>\n\n</think>\n\n" }}{% endif %}{% endif %}"""
QWEN = (
    """
{%- if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"""
    + QWEN_TURNS
    + """
{%- if message.tool_calls %}{% for call in message.tool_calls %}<tool_call>CALL</tool_call>{% endfor %}{% endif %}
{{- "<|im_end|>\n" }}
{%- else %}{{ "<|im_start|>" + message.role + "\n" + message.content + "<|im_end|>\n" }}{% endif %}
{%- endfor %}"""
    + QWEN_REPLY
)
# As in Llama 3: no template argument, a turn ends with another token than the end of sequence, and the text begins with
# a BOS.
LLAMA = """{{ bos_token }}
{%- for message in messages %}
{{- "<|start|>" + message.role + "<|end|>\n\n" + message.content | trim + "<|eot|>" }}
{%- endfor %}
{%- if add_generation_prompt %}{{ "<|start|>assistant<|end|>\n\n" }}{% endif %}"""
# A template without special tokens.
PLAIN = """{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}
{%- if add_generation_prompt %}assistant: {% endif %}"""


def byte_tokenizer(template: str | None, eos: str = "<|im_end|>", **special: str) -> PreTrainedTokenizerFast:
    """Return a byte-level tokenizer with special tokens of several families."""
    core = Tokenizer(models.BPE({c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    names = [
        "<|im_start|>",
        "<|im_end|>",
        "<|start|>",
        "<|end|>",
        "<|eot|>",
        "<bos>",
        "<eos>",
        "<pad>",
        "<think>",
        "</think>",
    ]
    core.add_special_tokens([AddedToken(name, special=True) for name in names])
    made = PreTrainedTokenizerFast(tokenizer_object=core, eos_token=eos, additional_special_tokens=names, **special)
    made.chat_template = template
    return made


def qwen(calls: str = "tojson") -> PreTrainedTokenizerFast:
    return byte_tokenizer(QWEN.replace("CALL", CALLS[calls]))


def llama() -> PreTrainedTokenizerFast:
    return byte_tokenizer(LLAMA, "<eos>", bos_token="<bos>")
