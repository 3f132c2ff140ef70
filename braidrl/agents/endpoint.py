"""An endpoint in front of an engine, which trains an external agent as a black box; `dialects` has the APIs that it
serves.

agent ──POST {url}/sessions/3.1.0.KEY/v1/chat/completions──▶ dialect ──▶ session ──token ids──▶ engine
  ▲                                                                 │  new messages, tokenized separately
  └── the reply as text ◀── dialect ◀── token ids, log-probs, versions, appended to the session's trajectory

A session is one row. While the agent's messages extend the last turn, tokens are only appended. Messages that extend an
earlier turn (a branch, a second agent, another choice) open a new sequence with that turn's tokens; other messages (a
summary) open one with new tokens. The model's text is never tokenized again.
"""

import asyncio
import hashlib
import hmac
import json
import secrets
import socket
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Handler

from braidrl.agents.dialects import DIALECTS, ChatDialect
from braidrl.agents.dialects.dialect import MODEL, THINK, TurnReply, TurnRequest, message_of
from braidrl.agents.listening import BACKLOG, BoundedConnections
from braidrl.agents.streamed_turns import TurnStream, first_stop, streamed
from braidrl.agents.trajectory import Trajectory, TurnSampling
from braidrl.agents.turns import SeenIds, TurnTemplate
from braidrl.data.chat import ChatMessage, normal_message
from braidrl.data.rows import FinishReason, Uid
from braidrl.data.token_columns import LOG_PROBS
from braidrl.data.vision import moved
from braidrl.engines.engine import Engine, EngineError
from braidrl.errors import UserError, shown
from braidrl.parsing import parse_json

BODY_BYTES, BODY_BYTES_PER_TOKEN, MOST_BODY_BYTES = 1 << 20, 16, 8 << 20
"""A request may have the first, plus the second per token of a sequence, and at most the third; a longer one is
answered with 413.
"""
ALL_BYTES = 128 << 20
"""Limit on the bodies of all requests in progress; further requests are answered with 503."""
BODY_S = 60.0
"""Seconds that a request's body may take to arrive."""
MOST_REQUESTS = 8
"""Limit on a row's requests at a time: its turns are made one after the other."""
MOST_TURNS = 10_000
"""Limit on a row's turns: each is kept until the row ends."""
INLINE_BYTES = 16 << 10
"""A longer request is rendered and tokenised in a thread, so that other rows do not wait for it."""
THREADS = 4
LINGER_S = 1.0
"""Seconds for which the rest of a refused body is read, so that its client sees the answer."""
COUNTING = "/count_tokens"
"""The end of a path that counts the tokens of a request."""
REASONS = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length", FinishReason.ABORT: "length"}


@dataclass
class EndpointSession:
    """One row's conversations: their messages, and their exact tokens."""

    trajectory: Trajectory
    turns: dict[bytes, tuple[int, int]] = field(default_factory=dict)
    """Where in `trajectory.tokens` the sequence of each conversation so far begins, and where its last turn ends, by
    the digest of its messages, replies included.
    """
    text: str = ""
    """The last context that was sent as a text, and its reply."""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held during a turn, since a row's turns are sequential."""
    requests: int = 0
    """Requests that are being read or answered."""

    def longest_known(self, messages: Sequence[ChatMessage]) -> tuple[int, tuple[int, int]]:
        """Return the length of the longest known prefix of `messages` that ends with a reply, and its position in the
        tokens; 0 if there is none.
        """
        for count, digest in reversed([*enumerate(digests(messages[:-1]), start=1)]):
            if digest in self.turns:
                return count, self.turns[digest]
        return 0, (0, 0)

    def remember(self, context: list[ChatMessage] | str | list[int], reply: ChatMessage) -> None:
        """Record that the last turn of the trajectory answers a context."""
        end = len(self.trajectory.tokens)
        if isinstance(context, str):
            self.text = context + (reply["content"] or "")
            return
        self.text = ""
        if isinstance(context[0], dict):
            conversation: Any = [*context, reply]
            self.turns[digests(conversation)[-1]] = (end - self.trajectory.sequence_lengths[-1], end)


class Endpoint:
    """An HTTP server on a free port of this machine, which serves while its context is open.

    The run's sampling settings replace the client's, since log-probs must match training's; only `max_tokens` is taken
    from the client.
    """

    def __init__(
        self,
        engine: Engine,
        template: TurnTemplate,
        turns: TurnSampling,
        host: str = "127.0.0.1",
        listener: socket.socket | None = None,
        key: str | None = None,
    ) -> None:
        """Set up the server.

        It listens at a free port of `host`, the address that clients use, or on `listener`, possibly in another
        network. Clients must send the API key `key`; with None a session's URL is enough. Raises UserError if the
        tokenizer has no chat template.
        """
        if not template.template.is_chat:
            raise UserError("the endpoint serves chats, and the tokenizer has no chat template; set one in its folder")
        self.engine, self.template, self.turns = engine, template, turns
        self._host, self._listener, self.key = host, listener, key
        self._began = int(time.time())
        self._sessions: dict[str, EndpointSession] = {}
        self._names: dict[Uid, str] = {}
        """The secret name of each open session, which only its client is given."""
        self._runner: web.AppRunner | None = None
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="endpoint")
        self._body_bytes = min(MOST_BODY_BYTES, BODY_BYTES + BODY_BYTES_PER_TOKEN * turns.max_sequence_tokens)
        self._held_bytes = 0
        """Bytes of the bodies of all requests that are being read and answered."""

    async def __aenter__(self) -> "Endpoint":
        application = web.Application(middlewares=[self._admit])
        for dialect in DIALECTS.values():
            path = f"/sessions/{{name}}{dialect.path}"
            application.router.add_post(path, partial(self._handle, dialect, self._answer))
            if dialect.counted is not None:
                application.router.add_post(path + COUNTING, partial(self._handle, dialect, self._count))
        application.router.add_get("/sessions/{name}/v1/models", self._models)
        application.router.add_get("/sessions/{name}/v1/models/{model:.+}", self._models)
        # A compressed body could expand to any size.
        self._runner = web.AppRunner(application, auto_decompress=False, lingering_time=LINGER_S)
        await self._runner.setup()
        assert self._runner.server is not None
        listener = self._listener
        if listener is None:
            flags, kind = socket.AI_PASSIVE, socket.SOCK_STREAM
            family, _, _, _, address = socket.getaddrinfo(self._host, 0, type=kind, flags=flags)[0]
            listener = socket.create_server(address[:2], family=family, backlog=BACKLOG)
        self._port = listener.getsockname()[1]
        self._connections = BoundedConnections(self._runner.server, listener)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._runner is not None
        await self._connections.close()
        await self._runner.cleanup()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def open(self, trajectory: Trajectory) -> str:
        """Start a row's session, which appends to its trajectory, and return its client's base URL. Raises ValueError
        if it is open.
        """
        if trajectory.uid in self._names:
            raise ValueError(f"the session of row {trajectory.uid} is open already")
        name = self._names[trajectory.uid] = ".".join(map(str, (*trajectory.uid, secrets.token_hex(8))))
        self._sessions[name] = EndpointSession(trajectory)
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"http://{host}:{self._port}/sessions/{name}/v1"

    async def close(self, uid: Uid) -> Trajectory:
        """End a row's session, abort a turn in flight, and return the trajectory.

        Raises KeyError if the session is not open.
        """
        session = self._sessions.pop(self._names.pop(uid))
        if session.lock.locked():
            # The turn may not have reached the engine yet, or has left it.
            with suppress(KeyError):
                await self.engine.abort(uid)
        async with session.lock:
            return session.trajectory

    @web.middleware
    async def _admit(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Forward a request to its handler if its key, its session and its path are valid."""
        # An error has the form of the requested API.
        matching = (d for d in DIALECTS.values() if request.path.removesuffix(COUNTING).endswith(d.path))
        usual = DIALECTS["messages" if "anthropic-version" in request.headers else "chat"]
        refused = partial(failed, next(matching, usual))
        sent = request.headers.get("Authorization", "").removeprefix("Bearer ") or request.headers.get("x-api-key", "")
        if self.key is not None and not hmac.compare_digest(sent.encode(), self.key.encode()):
            return refused(401, "the API key is not this endpoint's")
        name = request.match_info.get("name")
        if name is not None and name not in self._sessions:
            return refused(404, f"no session {name!r} is open")
        try:
            return await handler(request)
        except (web.HTTPNotFound, web.HTTPMethodNotAllowed):
            paths = ", ".join(dialect.path for dialect in DIALECTS.values())
            served = f"only POST {paths}, and GET /v1/models, under a session's address"
            return refused(404, f"{request.method} {request.path} is not served here: {served}")
        except UserError as error:
            return refused(400, str(error))
        except (EngineError, ConnectionError) as error:
            return refused(503, str(error))

    async def _handle(
        self,
        dialect: ChatDialect,
        answer: Callable[[web.Request, ChatDialect, EndpointSession, bytes], Awaitable[web.StreamResponse]],
        http: web.Request,
    ) -> web.StreamResponse:
        """Read a request's body within the limits, and answer it."""
        session = self._sessions[http.match_info["name"]]
        if session.requests >= MOST_REQUESTS:
            return failed(dialect, 429, f"this row has {MOST_REQUESTS} requests under way; wait for their answers")
        session.requests += 1
        raw = bytearray()
        try:
            if (http.content_length or 0) > self._body_bytes:
                raise web.HTTPRequestEntityTooLarge(self._body_bytes, http.content_length or 0)
            async with asyncio.timeout(BODY_S) as limit:
                async for part in http.content.iter_any():
                    raw += part
                    self._held_bytes += len(part)
                    if len(raw) > self._body_bytes:
                        raise web.HTTPRequestEntityTooLarge(self._body_bytes, len(raw))
                    if self._held_bytes > ALL_BYTES:
                        return failed(
                            dialect,
                            503,
                            "the endpoint reads too many long requests at a time; send this one again later",
                        )
            with self._connections.busy(http.protocol):
                return await answer(http, dialect, session, bytes(raw))
        except TimeoutError:
            if not limit.expired():
                raise
            return failed(dialect, 408, f"the request's body did not arrive within {BODY_S:g} s")
        finally:
            session.requests -= 1
            self._held_bytes -= len(raw)

    async def _answer(
        self, http: web.Request, dialect: ChatDialect, session: EndpointSession, raw: bytes
    ) -> web.StreamResponse:
        request, is_long = dialect.read(json_object(raw)), len(raw) > INLINE_BYTES

        def begin() -> tuple[TurnStream, "asyncio.Future[TurnReply]"]:
            stream = TurnStream(self.template.text, request.stops)
            return stream, asyncio.ensure_future(self._turn(session, request, stream, is_long))

        if request.stream:
            return await streamed(http, dialect, request, begin)
        replies = [await begin()[1] for _ in range(request.choices)]
        return web.json_response(dialect.answer(request, replies))

    async def _count(
        self, http: web.Request, dialect: ChatDialect, session: EndpointSession, raw: bytes
    ) -> web.StreamResponse:
        """Count the tokens of a context, without changing the row."""
        assert dialect.counted is not None
        request = dialect.read(json_object(raw))
        async with session.lock:
            tokenised, opens = await self._tokenised(session, request, len(raw) > INLINE_BYTES)
            return web.json_response(
                dialect.counted(len(tokenised.ids) + (0 if opens else len(session.trajectory.sequence)))
            )

    async def _models(self, http: web.Request) -> web.Response:
        name = http.match_info.get("model", MODEL)
        # Headers for OpenAI's clients, and for Anthropic's.
        model = {"id": name, "object": "model", "created": self._began, "owned_by": "braid"}
        began = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self._began))
        model |= {"type": "model", "display_name": name, "created_at": began, "lifecycle": "active"}
        listed = {"object": "list", "data": [model], "has_more": False, "first_id": name, "last_id": name}
        return web.json_response(model if "model" in http.match_info else listed)

    async def _turn(
        self, session: EndpointSession, request: TurnRequest, stream: TurnStream, is_long: bool
    ) -> TurnReply:
        """Generate a row's next turn, one at a time, and remember the conversation up to it."""
        trajectory = session.trajectory
        async with session.lock:
            if self._sessions.get(self._names.get(trajectory.uid, "")) is not session:
                raise UserError("the session of this row is closed")
            if trajectory.turns >= MOST_TURNS:
                raise UserError(f"this row has had {MOST_TURNS} turns, which is all that a row may have")
            new, opens = await self._tokenised(session, request, is_long)
            params = self.turns.params
            stops = (*params.stop, *request.stops)
            params = replace(params, max_tokens=request.limit or params.max_tokens, stop=stops)
            name = stream.name = f"{'.'.join(map(str, trajectory.uid))}-{trajectory.turns + 1}"
            context = new.ids if opens else [*trajectory.sequence, *new.ids]
            stream.context, stream.opened = len(context), self._opens_reasoning(context)
            # A possible tool call is sent when it is complete.
            on_token = stream.add_token if request.stream and not request.tools else None
            # The row is unchanged if this fails: the client may repeat its request.
            tokens = await trajectory.sample_turn(
                self.engine,
                new.ids,
                replace(self.turns, params=params),
                opens=opens,
                images=new.images,
                on_token=on_token,
            )
            text = self.template.text(tokens, request.tools)
            # The reply lacks the stop text that ended it, but its tokens are trained on.
            end = first_stop(text, request.stops)
            stop = (
                None
                if end is None
                else next(candidate for candidate in request.stops if text.startswith(candidate, end))
            )
            message = message_of(text[:end], bool(request.tools))
            await self._run(is_long, session.remember, request.context, message)
            reason = "tool_calls" if "tool_calls" in message else REASONS[trajectory.finish_reason]
            log_probs = trajectory.per_token[LOG_PROBS].tolist()
            log_probs = log_probs[len(log_probs) - len(tokens) :]
            return TurnReply(name, message, reason, context, tokens, log_probs, stop, stream.opened)

    async def _tokenised(self, session: EndpointSession, request: TurnRequest, is_long: bool) -> tuple[SeenIds, bool]:
        """Return the token ids to append before the reply, and whether these open a new sequence.

        Raises UserError for messages that the chat template refuses.
        """
        try:
            return await self._run(is_long, self._context, session, request)
        # A chat template may raise any exception for a client's message.
        except Exception as error:
            reason = shown(str(error))[1:-1]
            raise UserError(f"the messages are none for the chat template: {type(error).__name__}: {reason}") from error

    async def _run(self, is_long: bool, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function, in a thread if it takes long."""
        if not is_long:
            return function(*arguments)
        return await asyncio.get_running_loop().run_in_executor(self._threads, function, *arguments)

    def _context(self, session: EndpointSession, request: TurnRequest) -> tuple[SeenIds, bool]:
        """Return the token ids to append before the reply, and whether these open a new sequence."""
        context, template, trajectory = request.context, self.template, session.trajectory
        if isinstance(context, str):
            if session.text and context.startswith(session.text) and len(context) > len(session.text):
                return SeenIds(template.template.encode_texts([context[len(session.text) :]])[0]), False
            return SeenIds(template.template.encode_texts([context], begins=True)[0]), True
        if isinstance(context[0], int):
            ids: Any = context
            if not 0 <= min(ids) <= max(ids) < len(template.template.tokenizer):
                raise UserError(f"a token id must be between 0 and {len(template.template.tokenizer) - 1}")
            earlier_ids = trajectory.sequence if trajectory.sequence_lengths else []
            continues = bool(earlier_ids) and ids[: len(earlier_ids)] == earlier_ids
            return (SeenIds(ids[len(earlier_ids) :]), False) if continues else (SeenIds(ids), True)
        messages: Any = context
        count, (begin, end) = session.longest_known(messages)
        if not count:
            return template.first(messages, request.tools), True
        new = template.following(messages[count:], trajectory.tokens[end - 1], request.tools)
        if end == len(trajectory.tokens):
            return new, False
        spans = [span for span in moved(trajectory.images, -begin) if 0 <= span.start < end - begin]
        branch = SeenIds([*trajectory.tokens[begin:end], *new.ids], [*spans, *moved(new.images, end - begin)])
        return branch, True

    def _opens_reasoning(self, context: Sequence[int]) -> bool:
        """Return True if a context ends with the tag that begins reasoning."""
        tail: str = self.template.template.tokenizer.decode(context[-len(THINK) :], skip_special_tokens=False)
        return tail.rstrip().endswith(THINK)


def json_object(raw: bytes) -> Mapping[str, Any]:
    """Return a body's JSON object, empty for other values. Raises UserError for invalid JSON."""
    try:
        body = parse_json(raw, finite=False)
    except ValueError as error:
        raise UserError(f"the body is not JSON: {error}") from error
    return body if isinstance(body, dict) else {}


def digests(messages: Sequence[ChatMessage]) -> list[bytes]:
    """Return a digest of each prefix of a conversation, by its messages' contents."""
    beginnings, digest = [], hashlib.sha256()
    for message in messages:
        # Client libraries add empty fields.
        fields = {name: value for name, value in normal_message(message).items() if value is not None and value != []}
        digest.update(json.dumps(fields, sort_keys=True).encode() + b"\n")
        beginnings.append(digest.digest())
    return beginnings


def failed(dialect: ChatDialect, status: int, message: str) -> web.Response:
    return web.json_response(dialect.error(status, message), status=status)
