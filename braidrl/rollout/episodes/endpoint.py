"""An OpenAI-compatible endpoint in front of an engine: an agent written elsewhere is trained as a black box.

agent ──POST {url}/sessions/3.1.0.KEY/v1/chat/completions──▶ session ──token ids──▶ engine
  ▲                                                         │  what is new in `messages`, tokenised alone
  └──────────────── the reply as text ◀── token ids, log-probs, versions, appended to the session's trajectory

A session is one row. While the agent's messages go on from what was said before, its tokens are only ever appended to; messages
that do not (a summary, a second conversation) open a new sequence in the same row.
"""

import asyncio
import json
import secrets
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from aiohttp import web

from braidrl.data.rows import FinishReason
from braidrl.data.sources import Message
from braidrl.errors import UserError
from braidrl.rollout.engine import Engine, EngineError
from braidrl.rollout.episodes.tool_calls import call_id, parse_tool_calls
from braidrl.rollout.episodes.trajectory import Trajectory
from braidrl.rollout.episodes.turns import TurnTemplate
from braidrl.rollout.requests import Request, SamplingParams, Uid

BODY_BYTES = 64 << 20
"""A longer request is answered with 413."""
UNSUPPORTED = ("stream", "logprobs", "top_logprobs", "functions", "function_call", "logit_bias", "audio", "prediction")
"""Fields that ask for what is not served; with a value that asks for nothing, such as `stream: false`, they are let pass."""
USUAL = {"response_format": {"type": "text"}, "tool_choice": "auto", "modalities": ["text"], "n": 1}
"""Fields that may have this value alone."""
MOST_STOPS = 16
MODEL = "actor"
"""The name of the one model; requests may call it as they like."""
REASONS = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length", FinishReason.ABORT: "length"}


@dataclass
class EndpointSession:
    """One row's conversation: the messages that were seen, and exactly the tokens behind them."""

    trajectory: Trajectory
    said: list[Message] = field(default_factory=list)
    """All messages so far, replies included, as they went over the wire."""
    turns: int = 0
    finish_reason: FinishReason = FinishReason.STOP
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held during a turn, since a row's tokens are ordered."""


class Endpoint:
    """An HTTP server on a free port of this machine, unless one is given; it serves while its context is open.

    Sampling is the run's, whatever a client asks for, since its log-probs must be training's; `max_tokens` alone is the client's.
    """

    def __init__(
        self, engine: Engine, template: TurnTemplate, sampling: SamplingParams, max_sequence_tokens: int,
        purpose: str = "train", stage: str = "generate", host: str = "127.0.0.1", port: int = 0,
        listener: socket.socket | None = None,
    ) -> None:  # fmt: skip
        """Raise UserError for a tokenizer without a chat template, which could not tell the speakers apart.

        `listener` listens already, perhaps in another network, and stands in for host and port.
        """
        if not template.template.is_chat:
            raise UserError("the endpoint serves chats, and the tokenizer has no chat template; set one in its folder")
        self.engine, self.template, self.sampling = engine, template, sampling
        self.max_sequence_tokens, self.purpose, self.stage = max_sequence_tokens, purpose, stage
        self._host, self._port, self._listener = host, port, listener
        self._began = int(time.time())
        self._sessions: dict[str, EndpointSession] = {}
        self._names: dict[Uid, str] = {}
        """Of each open session the name that its client alone is told."""
        self._runner: web.AppRunner | None = None

    async def __aenter__(self) -> "Endpoint":
        application = web.Application(client_max_size=BODY_BYTES)
        application.router.add_post("/sessions/{name}/v1/chat/completions", self._handle)
        application.router.add_get("/sessions/{name}/v1/models", self._models)
        application.router.add_get("/sessions/{name}/v1/models/{model:.+}", self._models)
        application.router.add_route("*", "/{path:.*}", not_served)
        self._runner = web.AppRunner(application)
        await self._runner.setup()
        site = web.SockSite(self._runner, self._listener) if self._listener else None
        await (site or web.TCPSite(self._runner, self._host, self._port)).start()
        self._port = self._runner.addresses[0][1]
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._runner is not None
        await self._runner.cleanup()

    def open(self, uid: Uid) -> str:
        """Begin a row's session, and return the base URL for its client. Raises ValueError when it is open already."""
        if uid in self._names:
            raise ValueError(f"the session of row {uid} is open already")
        name = self._names[uid] = f"{session_name(uid)}.{secrets.token_hex(8)}"
        self._sessions[name] = EndpointSession(Trajectory(uid))
        return f"http://{self._host}:{self._port}/sessions/{name}/v1"

    async def close(self, uid: Uid) -> EndpointSession:
        """End a row's session, aborting a turn in flight; later requests get an error. Raises KeyError for a session that is not open."""
        session = self._sessions.pop(self._names.pop(uid))
        if session.lock.locked():
            # the turn may just be before or behind its time in the engine; then there is nothing to abort
            with suppress(KeyError):
                await self.engine.abort(uid)
        async with session.lock:
            return session

    async def _handle(self, http: web.Request) -> web.Response:
        session = self._sessions.get(http.match_info["name"])
        if session is None:
            return failed(404, f"no session {http.match_info['name']!r} is open")
        try:
            asked = checked(await body_of(http))
            async with session.lock:
                return web.json_response(await self._complete(session, asked))
        except UserError as error:
            return failed(400, str(error))
        except EngineError as error:
            return failed(503, str(error))

    async def _models(self, http: web.Request) -> web.Response:
        if http.match_info["name"] not in self._sessions:
            return failed(404, f"no session {http.match_info['name']!r} is open")
        one = {
            "id": http.match_info.get("model", MODEL),
            "object": "model",
            "created": self._began,
            "owned_by": "braid",
        }
        return web.json_response(one if "model" in http.match_info else {"object": "list", "data": [one]})

    async def _complete(self, session: EndpointSession, asked: Mapping[str, Any]) -> dict[str, Any]:
        trajectory, tools = session.trajectory, asked.get("tools") or ()
        try:
            ids, opens = self._context(session, asked["messages"], tools)
        # A chat template may raise whatever it likes over what a client has written into a message.
        except Exception as error:
            raise UserError(f"the messages are none for the chat template: {type(error).__name__}: {error}") from error
        context = ids if opens else [*trajectory.sequence, *ids]
        room = self.max_sequence_tokens - len(context)
        if room < 1:
            raise UserError(f"{len(context)} tokens leave no room in a sequence of {self.max_sequence_tokens}")
        limit, stops = max_tokens_of(asked) or self.sampling.max_tokens, stops_of(asked)
        sampling = replace(self.sampling, max_tokens=min(limit, room), stop=(*self.sampling.stop, *stops))
        finished = await self.engine.submit(
            Request(
                trajectory.uid, torch.tensor(context), sampling,
                self.purpose, self.stage, first_draw=trajectory.action_tokens,
            )
        )  # fmt: skip
        # only now: a client that repeats a request which failed must find the row as it was
        trajectory.append(ids, opens=opens)
        trajectory.append(finished.tokens.tolist(), log_probs=finished.log_probs, versions=finished.versions)
        session.turns, session.finish_reason = session.turns + 1, finished.finish_reason
        message = reply(before_stop(self.template.text(trajectory.last_turn, tools), stops), bool(tools))
        session.said = [*asked["messages"], message]
        reason = "tool_calls" if "tool_calls" in message else REASONS[finished.finish_reason]
        return completion(asked, session, message, reason, len(context), len(finished.tokens))

    def _context(self, session: EndpointSession, messages: list[Message], tools: Any) -> tuple[list[int], bool]:
        """Return the token ids to append before the reply, and whether they open a new sequence."""
        known = len(session.said)
        if known and len(messages) > known and messages[:known] == session.said:
            new = [as_template(message) for message in messages[known:]]
            return self.template.following(new, session.trajectory.sequence[-1], tools), False
        return self.template.first([as_template(message) for message in messages], tools), True


def session_name(uid: Uid) -> str:
    return ".".join(map(str, uid))


async def body_of(http: web.Request) -> Any:
    """Return a request's JSON. Raises UserError for what is none."""
    try:
        return await http.json()
    except (ValueError, LookupError, RecursionError) as error:
        raise UserError(f"the body is not JSON: {type(error).__name__}: {error}") from error


def max_tokens_of(asked: Mapping[str, Any]) -> int | None:
    """Return how many tokens a client wants at most, None where it does not say. Raises UserError for what is no such number."""
    name = next((name for name in ("max_completion_tokens", "max_tokens") if asked.get(name) is not None), None)
    if name is None:
        return None
    wanted = asked[name]
    if isinstance(wanted, bool) or not isinstance(wanted, int | float) or wanted != wanted // 1 or wanted < 1:
        raise UserError(f"{name} must be a whole number from 1 on, not {wanted!r}")
    return int(wanted)


def stops_of(asked: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the texts that a client's reply ends before. Raises UserError for what are none."""
    stop = asked.get("stop")
    stops = [] if stop is None else [stop] if isinstance(stop, str) else stop
    if not isinstance(stops, list) or len(stops) > MOST_STOPS or not all(isinstance(s, str) and s for s in stops):
        raise UserError(f"stop must be a text that is not empty, or a list of up to {MOST_STOPS} such, not {stop!r}")
    return tuple(stops)


def before_stop(text: str, stops: Sequence[str]) -> str:
    """Return a reply without the stop text that ended it; its tokens, which were drawn, are trained on."""
    ends = [place for stop in stops if (place := text.find(stop)) >= 0]
    return text[: min(ends)] if ends else text


async def not_served(http: web.Request) -> web.Response:
    """Answer a request for anything else."""
    return failed(
        404,
        f"{http.method} {http.path} is not served here: only POST chat/completions and GET models under a session's URL",
    )


def checked(body: Any) -> Mapping[str, Any]:
    """Return a request's body. Raises UserError for what is not served here."""
    if not isinstance(body, dict) or not isinstance(body.get("messages"), list) or not body["messages"]:
        raise UserError("`messages` must be a list of {role, content}")
    for name in UNSUPPORTED:
        if body.get(name):
            raise UserError(f"{name!r} is not served here; leave it out")
    for name, usual in USUAL.items():
        if body.get(name, usual) not in (usual, None):
            more = ": each session is one row" if name == "n" else ""
            raise UserError(f"{name} must be {usual if name == 'n' else json.dumps(usual)}{more}")
    if not isinstance(body.get("tools") or [], list):
        raise UserError("`tools` must be a list of functions")
    for message in body["messages"]:
        check_message(message)
    max_tokens_of(body)
    stops_of(body)
    return body


def check_message(message: Any) -> None:
    """Raise UserError unless this is a message, with text alone in it."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise UserError(f"a message is an object with a role, not {message!r}")
    content = message.get("content")
    parts = content if isinstance(content, list) else [{"type": "text", "text": content or ""}]
    for part in parts:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise UserError(f"the content of a message is text, or a list of {{type: text, text}}, not {content!r}")


def as_template(message: Message) -> Message:
    """Convert a message for chat templates: content as text, arguments of calls as objects."""
    content = message.get("content") or ""
    if isinstance(content, list):
        content = "".join(part.get("text", "") for part in content)
    taken = {**message, "content": content}
    if message.get("tool_calls"):
        taken["tool_calls"] = [{**call, "function": with_object(call["function"])} for call in message["tool_calls"]]
    return taken


def with_object(function: Mapping[str, Any]) -> dict[str, Any]:
    arguments = function["arguments"]
    return {**function, "arguments": json.loads(arguments) if isinstance(arguments, str) else arguments}


def reply(text: str, with_tools: bool) -> Message:
    """Make the assistant's message; well-formed tool calls are parsed where the request named tools."""
    calls = [call for call in parse_tool_calls(text) if call.fault is None] if with_tools else []
    if not calls:
        return {"role": "assistant", "content": text}
    return {
        "role": "assistant",
        "content": text.partition("<tool_call>")[0].strip() or None,
        "tool_calls": [
            {
                "id": call_id(number), "type": "function",
                "function": {"name": call.name, "arguments": json.dumps(call.arguments)},
            }
            for number, call in enumerate(calls)
        ],
    }  # fmt: skip


def completion(
    asked: Mapping[str, Any], session: EndpointSession, message: Message, reason: str, prompt: int, sampled: int
) -> dict[str, Any]:
    return {
        "id": f"{session_name(session.trajectory.uid)}-{session.turns}", "object": "chat.completion",
        "created": int(time.time()), "model": asked.get("model", MODEL),
        "choices": [{"index": 0, "message": message, "finish_reason": reason}],
        "usage": {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled},
    }  # fmt: skip


def failed(status: int, message: str) -> web.Response:
    return web.json_response({"error": {"message": message, "type": "invalid_request_error"}}, status=status)
