"""OpenAI's completions: a prompt of text or token ids, without a chat template, and vLLM's `return_token_ids`."""

from collections.abc import Iterator, Sequence
from typing import Any

from braidrl.agents.dialects.chat import DONE, completion, counts_tokens, error, usage
from braidrl.agents.dialects.dialect import (
    ChatDialect,
    Json,
    TurnEvents,
    TurnReply,
    TurnRequest,
    event,
    read_choices,
    read_limit,
    read_model,
    read_stops,
    refuse,
)
from braidrl.errors import UserError, shown

UNSUPPORTED = ("logprobs", "prompt_logprobs", "echo", "suffix", "logit_bias")
USUAL = {"best_of": 1}
KIND = "text_completion"


def read(body: Json) -> TurnRequest:
    """Read a request. Raises UserError for unsupported fields, and for several prompts."""
    refuse(body, UNSUPPORTED, USUAL)
    return TurnRequest(
        read_prompt(body.get("prompt")),
        limit=read_limit(body, "max_tokens"),
        stops=read_stops(body, "stop"),
        stream=bool(body.get("stream")),
        counts=counts_tokens(body),
        model=read_model(body),
        choices=read_choices(body),
        shows_tokens=bool(body.get("return_token_ids")),
    )


def read_prompt(value: Any) -> str | list[int]:
    """Return the single prompt of a request, possibly from a list."""
    prompt = value[0] if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str | list) else value
    if isinstance(prompt, str) and prompt:
        return prompt
    if isinstance(prompt, list) and prompt and all(type(token) is int for token in prompt):
        return prompt
    raise UserError(f"prompt must be one text or one list of token ids, and not empty; got {shown(value)}")


def choice(request: TurnRequest, index: int, text: str, reply: TurnReply | None) -> dict[str, Any]:
    """Return a choice, complete if it has its reply."""
    fields: dict[str, Any] = {"index": index, "text": text, "logprobs": None, "finish_reason": reply and reply.reason}
    if request.shows_tokens and reply is not None:
        fields |= {"token_ids": list(reply.tokens), "prompt_token_ids": list(reply.context), "stop_reason": reply.stop}
    return fields


def answer(request: TurnRequest, replies: Sequence[TurnReply]) -> Json:
    choices = [choice(request, index, reply.text, reply) for index, reply in enumerate(replies)]
    return {**completion(request, replies[0].name, KIND, choices), "usage": usage(replies)}


class CompletionEvents(TurnEvents):
    """Chunks of a completion, each with one choice."""

    def piece(self, index: int, text: str) -> Iterator[str]:
        self.sent += text
        yield event(completion(self.request, self.name, KIND, [choice(self.request, index, text, None)]))

    def end(self, index: int, reply: TurnReply) -> Iterator[str]:
        rest = choice(self.request, index, reply.text[len(self.sent) :], reply)
        yield event(completion(self.request, self.name, KIND, [rest]))
        self.sent = ""

    def over(self, replies: Sequence[TurnReply]) -> Iterator[str]:
        if self.request.counts:
            yield event({**completion(self.request, self.name, KIND, []), "usage": usage(replies)})
        yield DONE


COMPLETIONS = ChatDialect("/v1/completions", read, answer, CompletionEvents, error)
