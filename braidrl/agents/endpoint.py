"""An OpenAI-compatible endpoint in front of an engine, which trains an external agent as a black box.

agent ──POST {url}/sessions/3.1.0.KEY/v1/chat/completions──▶ session ──token ids──▶ engine
  ▲                                                         │  what is new in `messages`, tokenised alone
  └──────────────── the reply as text ◀── token ids, log-probs, versions, appended to the session's trajectory

A session is one row. While the agent's messages extend the conversation, tokens are only appended; other messages (a
summary, a second conversation) open a new sequence in the same row.
"""

import asyncio
import hmac
import secrets
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace

from aiohttp import web
from aiohttp.typedefs import Handler

from braidrl.agents.listening import BACKLOG, BoundedConnections
from braidrl.agents.openai_api import MODEL, TurnReply, TurnRequest, completion, event, events, read, reply
from braidrl.agents.trajectory import Trajectory
from braidrl.agents.turns import TurnTemplate
from braidrl.data.chat import ChatMessage
from braidrl.data.rows import FinishReason, Uid
from braidrl.engines.engine import Engine, EngineError
from braidrl.engines.requests import SamplingParams
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
PATH = "chat/completions"
"""The path of turns below a session's URL."""
WORD_EVERY_S, UNDER_WAY = 10.0, ": the turn is under way\n\n"
"""The interval and text of the keep-alive comment that a streaming client gets while its turn is in progress."""
UNFINISHED = "\ufffd"
"""A decoder's output for bytes that are not a complete character yet."""
REASONS = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length", FinishReason.ABORT: "length"}


@dataclass
class EndpointSession:
    """One row's conversation: its messages, and exactly their tokens."""

    trajectory: Trajectory
    said: list[ChatMessage] = field(default_factory=list)
    """All messages so far, including replies, as they were sent."""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held during a turn, since a row's turns are sequential."""
    requests: int = 0
    """Requests that are being read or answered."""


class TurnStream:
    """A turn that is streamed to its client while it is drawn: its tokens, and the pieces of their text that may be
    sent.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], stops: Sequence[str]) -> None:
        self.name, self.pieces = "", list[str]()
        self.drawn = asyncio.Event()
        self._decode, self._stops = decode, stops
        self._held = max(map(len, stops), default=1) - 1
        """Characters at the text's end that are not sent yet: a stop text may begin there."""
        self._tokens: list[int] = []
        self._text, self._sent, self._from, self._read = "", 0, 0, 0

    def add_token(self, number: int, token: int) -> None:
        """Add a token by its index in the response, and ignore a token that another engine draws again."""
        if number == len(self._tokens):
            self._tokens.append(token)
            self.drawn.set()

    def add_piece(self) -> bool:
        """Add the next piece of the text: whole characters that belong to no stop text.

        Return False if there is none yet.
        """
        self.drawn.clear()
        # Decoded with earlier tokens, since a decoder may treat the first token of a text differently.
        before, now = (self._decode(self._tokens[self._from : end]) for end in (self._read, len(self._tokens)))
        if not now.endswith(UNFINISHED):
            self._text += now[len(before) :]
            self._from, self._read = self._read, len(self._tokens)
        # A stop text that is complete begins in the part that was not sent.
        end = first_stop(self._text, self._stops, self._sent)
        end = len(self._text) - self._held if end is None else end
        piece = self._text[self._sent : max(end, self._sent)]
        self._sent += len(piece)
        self.pieces += [piece] if piece else []
        return bool(piece)


class Endpoint:
    """An HTTP server on a free port of this machine, which serves while its context is open.

    The run's sampling settings replace the client's, since log-probs must match training's; only `max_tokens` is the
    client's.
    """

    def __init__(
        self,
        engine: Engine,
        template: TurnTemplate,
        sampling: SamplingParams,
        max_sequence_tokens: int,
        purpose: str = "train",
        stage: str = "generate",
        host: str = "127.0.0.1",
        columns: tuple[str, ...] = (),
        listener: socket.socket | None = None,
        key: str | None = None,
    ) -> None:
        """Set up the server; random numbers depend on the rows' `purpose` and the generate `stage`.

        Turns have these `columns` per token.

        It listens at a free port of `host`, the address that clients use, or on `listener`, perhaps in another network.
        Clients must send the API key `key`; with None a session's URL is enough. Raises UserError if the tokenizer has
        no chat template.
        """
        if not template.template.is_chat:
            raise UserError("the endpoint serves chats, and the tokenizer has no chat template; set one in its folder")
        self.engine, self.template, self.sampling = engine, template, sampling
        self.max_sequence_tokens, self.purpose, self.stage = max_sequence_tokens, purpose, stage
        self.columns = columns
        self._host, self._listener, self.key = host, listener, key
        self._began = int(time.time())
        self._sessions: dict[str, EndpointSession] = {}
        self._names: dict[Uid, str] = {}
        """The secret name of each open session, which only its client is given."""
        self._runner: web.AppRunner | None = None
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="endpoint")
        self._body_bytes = min(MOST_BODY_BYTES, BODY_BYTES + BODY_BYTES_PER_TOKEN * max_sequence_tokens)
        self._held_bytes = 0
        """Bytes of the bodies of all requests that are being read and answered."""

    async def __aenter__(self) -> "Endpoint":
        application = web.Application(middlewares=[self._admit])
        application.router.add_post(f"/sessions/{{name}}/v1/{PATH}", self._handle)
        application.router.add_get("/sessions/{name}/v1/models", self._models)
        application.router.add_get("/sessions/{name}/v1/models/{model:.+}", self._models)
        # A compressed body could have any size.
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
        """Begin a row's session, which appends to its trajectory, and return its client's base URL.

        Raises ValueError if it is open.
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
        """Pass a request on to its handler if its key, its session and its path are served."""
        sent = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if self.key is not None and not hmac.compare_digest(sent.encode(), self.key.encode()):
            return failed(401, "the API key is not this endpoint's")
        name = request.match_info.get("name")
        if name is not None and name not in self._sessions:
            return failed(404, f"no session {name!r} is open")
        try:
            return await handler(request)
        except (web.HTTPNotFound, web.HTTPMethodNotAllowed):
            served = f"only POST {PATH} and GET models under a session's URL"
            return failed(404, f"{request.method} {request.path} is not served here: {served}")
        except UserError as error:
            return failed(400, str(error))
        except (EngineError, ConnectionError) as error:
            return failed(503, str(error))

    async def _handle(self, http: web.Request) -> web.StreamResponse:
        session = self._sessions[http.match_info["name"]]
        if session.requests >= MOST_REQUESTS:
            return failed(429, f"this row has {MOST_REQUESTS} requests under way; wait for their answers")
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
                            503, "the endpoint reads too many long requests at a time; send this one again later"
                        )
            with self._connections.busy(http.protocol):
                return await self._answer(http, session, bytes(raw))
        except TimeoutError:
            if not limit.expired():
                raise
            return failed(408, f"the request's body did not arrive within {BODY_S:g} s")
        finally:
            session.requests -= 1
            self._held_bytes -= len(raw)

    async def _answer(self, http: web.Request, session: EndpointSession, raw: bytes) -> web.StreamResponse:
        try:
            body = parse_json(raw, finite=False)
        except ValueError as error:
            raise UserError(f"the body is not JSON: {error}") from error
        asked = read(body if isinstance(body, dict) else {})
        stream = TurnStream(self.template.text, asked.stops)
        turn = asyncio.ensure_future(self._turn(session, asked, stream, len(raw) > INLINE_BYTES))
        if asked.stream:
            return await streamed(http, asked, turn, stream)
        made = await turn
        choice = {"message": made.message, "finish_reason": made.reason}
        return web.json_response(completion(asked, made.name, choice, made))

    async def _models(self, http: web.Request) -> web.Response:
        name = http.match_info.get("model", MODEL)
        one = {"id": name, "object": "model", "created": self._began, "owned_by": "braid"}
        return web.json_response(one if "model" in http.match_info else {"object": "list", "data": [one]})

    async def _turn(self, session: EndpointSession, asked: TurnRequest, stream: TurnStream, is_long: bool) -> TurnReply:
        """Generate a row's next turn, one at a time, and remember the conversation up to it."""
        trajectory = session.trajectory
        async with session.lock:
            if self._sessions.get(self._names.get(trajectory.uid, "")) is not session:
                raise UserError("the session of this row is closed")
            if trajectory.turns >= MOST_TURNS:
                raise UserError(f"this row has had {MOST_TURNS} turns, which is all that a row may have")
            try:
                if is_long:
                    loop = asyncio.get_running_loop()
                    ids, opens = await loop.run_in_executor(self._threads, self._context, session, asked)
                else:
                    ids, opens = self._context(session, asked)
            # A chat template may raise any exception for a client's message.
            except Exception as error:
                said = shown(str(error))[1:-1]
                raise UserError(
                    f"the messages are none for the chat template: {type(error).__name__}: {said}"
                ) from error
            stops = (*self.sampling.stop, *asked.stops)
            sampling = replace(self.sampling, max_tokens=asked.limit or self.sampling.max_tokens, stop=stops)
            name = stream.name = f"{'.'.join(map(str, trajectory.uid))}-{trajectory.turns + 1}"
            # A possible tool call is sent when it is complete.
            on_token = stream.add_token if asked.stream and not asked.tools else None
            # The row is unchanged if this fails: the client may repeat its request.
            tokens = await trajectory.sample_turn(
                self.engine,
                ids,
                sampling,
                self.max_sequence_tokens,
                self.purpose,
                self.stage,
                columns=self.columns,
                opens=opens,
                on_token=on_token,
            )
            text = self.template.text(tokens, asked.tools)
            # The reply lacks the stop text that ended it, whose tokens are trained on all the same.
            text = text[: first_stop(text, asked.stops)]
            message = reply(text, bool(asked.tools))
            session.said = [*asked.messages, message]
            reason = "tool_calls" if "tool_calls" in message else REASONS[trajectory.finish_reason]
            return TurnReply(name, message, reason, len(trajectory.sequence) - len(tokens), len(tokens))

    def _context(self, session: EndpointSession, asked: TurnRequest) -> tuple[list[int], bool]:
        """Return the token ids to append before the reply, and whether these open a new sequence."""
        known, messages = len(session.said), asked.messages
        # Client libraries add empty fields.
        before, said = (
            [{name: value for name, value in message.items() if value is not None and value != []} for message in some]
            for some in (messages[:known], session.said)
        )
        if known and len(messages) > known and before == said:
            return self.template.following(messages[known:], session.trajectory.sequence[-1], asked.tools), False
        return self.template.first(messages, asked.tools), True


async def streamed(
    http: web.Request, asked: TurnRequest, turn: "asyncio.Future[TurnReply]", stream: TurnStream
) -> web.StreamResponse:
    """Stream a turn as events while its tokens are drawn, with a keep-alive comment every `WORD_EVERY_S`, and the rest
    at its end.

    Raises UserError or EngineError if the turn fails before anything was sent.
    """
    answer = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    is_over = False
    try:
        while not is_over:
            coming = asyncio.ensure_future(stream.drawn.wait())
            await asyncio.wait((turn, coming), timeout=WORD_EVERY_S, return_when=asyncio.FIRST_COMPLETED)
            coming.cancel()
            is_over, has_drawn = turn.done(), stream.drawn.is_set()
            sent: Iterable[str] = ()
            if is_over:
                error = turn.exception()
                if error is not None and not answer.prepared:
                    raise error
                failure = [event({"error": {"message": str(error)}})]
                sent = failure if error else events(asked, turn.result().name, stream.pieces, turn.result())
            elif stream.add_piece():
                sent = events(asked, stream.name, stream.pieces, None)
            elif not has_drawn:
                sent = (UNDER_WAY,)
            for each in sent:
                if not answer.prepared:
                    await answer.prepare(http)
                await answer.write(each.encode())
    except ConnectionError:  # the client has gone; what was drawn for it belongs to its row
        await asyncio.wait((turn,))
    return answer


def first_stop(text: str, stops: Sequence[str], begin: int = 0) -> int | None:
    """Return the first position from `begin` on at which a text has one of the stop texts; None if it has none."""
    return min((place for stop in stops if (place := text.find(stop, begin)) >= 0), default=None)


def failed(status: int, message: str) -> web.Response:
    return web.json_response({"error": {"message": message, "type": "invalid_request_error"}}, status=status)
