"""Three styles of chat templates with a small tokenizer, and engines that record or follow a script."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from braidrl.agents.turns import TurnTemplate
from braidrl.algorithms.ragged import Ragged
from braidrl.data.rows import FinishReason, Objects, Rows
from braidrl.data.templates import PromptTemplate
from braidrl.engines.engine import Engine, Load
from braidrl.engines.requests import Request, Response
from tests.engines.tiny import response_of

CHATML = """
{%- if tools %}
{{- "<|im_start|>system\nCall functions within <tool_call></tool_call> tags.\n<tools>" }}
{%- for tool in tools %}{{ "\n" + (tool | tojson) }}{% endfor %}
{{- "\n</tools><|im_end|>\n" }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == "tool" %}
{%- if loop.first or messages[loop.index0 - 1].role != "tool" %}{{ "<|im_start|>user" }}{% endif %}
{{- "\n<tool_response>\n" + message.content + "\n</tool_response>" }}
{%- if loop.last or messages[loop.index0 + 1].role != "tool" %}{{ "<|im_end|>\n" }}{% endif %}
{%- else %}{{ "<|im_start|>" + message.role + "\n" + message.content + "<|im_end|>\n" }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ "<|im_start|>assistant\n" }}{% endif %}"""
HEADERS = """{{ "<|begin_of_text|>" }}
{%- for message in messages %}
{%- set role = "ipython" if message.role == "tool" else message.role %}
{{- "<|start_header_id|>" + role + "<|end_header_id|>\n\n" + message.content | trim + "<|eot_id|>" }}
{%- endfor %}
{%- if add_generation_prompt %}{{ "<|start_header_id|>assistant<|end_header_id|>\n\n" }}{% endif %}"""
THINKING = """
{%- for message in messages %}
{%- set content = message.content.split("</think>")[-1].lstrip("\n")
    if message.role == "assistant" else message.content %}
{{- "<|im_start|>" + message.role + "\n" + content + "<|im_end|>\n" }}
{%- endfor %}
{%- if add_generation_prompt %}{{ "<|im_start|>assistant\n<think>\n" }}{% endif %}"""
STYLES = {
    "chatml": (CHATML, "<|im_end|>", ["<|im_start|>"]),
    "headers": (HEADERS, "<|eot_id|>", ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>"]),
    "thinking": (THINKING, "<|im_end|>", ["<|im_start|>"]),
}
CORPUS = [
    "assistant user system higher lower the number is guess <tool_response> tool_call",
    "aa aab abab 12 123 1234",
] * 4


def make_chat_tokenizer(style: str | None) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer, so that most texts have several tokenizations; with None it has no chat
    template.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet, show_progress=False)
    )
    template, end, others = STYLES[style] if style else (None, "<end>", [])
    tokenizer.add_special_tokens([end, *others])
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=end, additional_special_tokens=others)
    made.chat_template = template
    return made


def turn_template(tokenizer: PreTrainedTokenizerFast) -> TurnTemplate:
    return TurnTemplate(PromptTemplate(tokenizer))


def make_rows(tokenizer: PreTrainedTokenizerFast, prompts: Sequence[str], samples: int = 1) -> Rows:
    """Return rows as admission makes them."""
    template = PromptTemplate(tokenizer)
    each = [(group, sample) for group in range(len(prompts)) for sample in range(samples)]
    ids = Ragged.from_rows([template.encode(prompts[group]) for group, _ in each], torch.int64)
    return Rows(
        {
            "source": torch.zeros(len(each), dtype=torch.int64),
            "group": torch.tensor([group for group, _ in each]),
            "sample": torch.tensor([sample for _, sample in each]),
            "prompt": ids,
            "prompt_length": ids.lengths,
            "metadata": Objects(tuple({"prompt": prompts[group], "answer": None} for group, _ in each)),
        }
    )


class Recorder:
    """An engine that records its requests and responses."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.seen: dict[tuple[int, int, int], list[tuple[list[int], list[int]]]] = {}

    async def submit(self, request: Request) -> Response:
        finished = await self.engine.submit(request)
        self.seen.setdefault(request.uid, []).append((request.prompt.tolist(), finished.tokens.tolist()))
        return finished

    def load(self) -> Load:
        return self.engine.load()


class Script:
    """An engine whose rows say the given texts, one per turn, each in `seconds` and with an end-of-sequence token."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, texts: Sequence[str], seconds: float = 0.0) -> None:
        self.tokenizer, self.texts, self.seconds = tokenizer, list(texts), seconds
        self.turns: dict[tuple[int, int, int], int] = {}
        self.running = 0

    async def submit(self, request: Request) -> Response:
        turn = self.turns.get(request.uid, 0)
        self.turns[request.uid] = turn + 1
        self.running += 1
        await asyncio.sleep(self.seconds)
        self.running -= 1
        ids = [*self.tokenizer(self.texts[turn % len(self.texts)])["input_ids"], self.tokenizer.eos_token_id]
        cut = ids[: request.sampling.max_tokens]
        reason = FinishReason.STOP if cut == ids else FinishReason.LENGTH
        tokens = torch.tensor(cut)
        return response_of(request.uid, tokens, reason, -torch.ones(len(cut)))
