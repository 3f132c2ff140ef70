"""vLLM's tokens in and out (`/inference/v1/generate`): ids of the context, and of the turn with their log-probs."""

from collections.abc import Iterator, Sequence
from typing import Any

from braidrl.agents.dialects.chat import DONE, counts_tokens, error, usage
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

UNSUPPORTED = ("features", "content_parts", "kv_transfer_params", "ec_transfer_params")
USUAL = {"output_mode": "tokens"}
UNSUPPORTED_SAMPLING = ("prompt_logprobs", "structured_outputs", "bad_words", "allowed_token_ids", "logit_bias")


def read(body: Json) -> TurnRequest:
    """Read a request. Raises UserError for one without token ids, and for unsupported fields."""
    refuse(body, UNSUPPORTED, USUAL)
    ids, sampling = body.get("token_ids"), body.get("sampling_params", {})
    if not isinstance(ids, list) or not ids or not all(type(token) is int for token in ids):
        raise UserError(f"token_ids must be a list of token ids, and not empty; got {shown(ids)}")
    if not isinstance(sampling, dict):
        raise UserError(f"sampling_params must be an object, not {shown(sampling)}")
    refuse(sampling, UNSUPPORTED_SAMPLING)
    return TurnRequest(
        ids,
        limit=read_limit(sampling, "max_tokens"),
        stops=read_stops(sampling, "stop"),
        stream=bool(body.get("stream")),
        counts=counts_tokens(body),
        model=read_model(body),
        choices=read_choices(sampling),
        shows_tokens=bool(body.get("return_token_ids")),
    )


def choice(index: int, reply: TurnReply) -> dict[str, Any]:
    """Return a choice with the log-prob of each token, the only log-prob that the run keeps."""
    both = zip(reply.tokens, reply.log_probs, strict=True)
    content = [{"token_id": token, "logprob": log_prob, "top_logprobs": []} for token, log_prob in both]
    return {
        "index": index,
        "finish_reason": reply.reason,
        "stop_reason": reply.stop,
        "token_ids": list(reply.tokens),
        "logprobs": {"content": content},
    }


def answer(request: TurnRequest, replies: Sequence[TurnReply]) -> Json:
    context = {"prompt_token_ids": list(replies[0].context)} if request.shows_tokens else {}
    choices = [choice(index, reply) for index, reply in enumerate(replies)]
    named = {"request_id": replies[0].name, "model": request.model, "output_mode": "tokens"}
    return {**named, "choices": choices, "usage": usage(replies), **context}


class TokenEvents(TurnEvents):
    """One event for each choice, when it is complete: log-probs are not known earlier."""

    def piece(self, index: int, text: str) -> Iterator[str]:
        yield from ()

    def end(self, index: int, reply: TurnReply) -> Iterator[str]:
        context = {"prompt_token_ids": list(reply.context)} if self.request.shows_tokens and index == 0 else {}
        yield self.made([choice(index, reply)], context)

    def over(self, replies: Sequence[TurnReply]) -> Iterator[str]:
        if self.request.counts:
            yield self.made([], {"usage": usage(replies)})
        yield DONE

    def made(self, choices: Sequence[Json], more: Json) -> str:
        return event({"request_id": self.name, "output_mode": "tokens", "choices": choices, **more})


TOKEN_IDS = ChatDialect("/inference/v1/generate", read, answer, TokenEvents, error)
