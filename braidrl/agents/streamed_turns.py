"""Turns that are streamed to their client while the engine generates them.

engine ──tokens──▶ TurnStream ──pieces of text──▶ TurnEvents of a dialect ──▶ client
"""

import asyncio
from collections.abc import Callable, Iterable, Sequence

from aiohttp import web

from braidrl.agents.dialects.dialect import ChatDialect, TurnEvents, TurnReply, TurnRequest

WORD_EVERY_S = 10.0
"""The interval of the keep-alive events that a streaming client gets while its turn is in progress."""
UNFINISHED = "\ufffd"
"""A decoder's output for bytes that are not a complete character yet."""


class TurnStream:
    """A turn streamed to its client while generated: its tokens, and the pieces of their text that may be sent."""

    def __init__(self, decode: Callable[[Sequence[int]], str], stops: Sequence[str]) -> None:
        self.name, self.context, self.opened, self.pieces = "", 0, False, list[str]()
        self.drawn = asyncio.Event()
        self._decode, self._stops = decode, stops
        self._held_back = max(map(len, stops), default=1) - 1
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
        # A complete stop text begins in the unsent part.
        end = first_stop(self._text, self._stops, self._sent)
        end = len(self._text) - self._held_back if end is None else end
        piece = self._text[self._sent : max(end, self._sent)]
        self._sent += len(piece)
        self.pieces += [piece] if piece else []
        return bool(piece)


async def streamed(
    http: web.Request,
    dialect: ChatDialect,
    request: TurnRequest,
    begin: Callable[[], tuple[TurnStream, "asyncio.Future[TurnReply]"]],
) -> web.StreamResponse:
    """Stream the choices of a request, each as its tokens are drawn, with a keep-alive event every `WORD_EVERY_S`.

    Raises UserError or EngineError if the first turn fails before anything was sent.
    """
    answer = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    events: TurnEvents | None = None
    replies: list[TurnReply] = []

    async def send(events_to_send: Iterable[str]) -> None:
        for line in events_to_send:
            if not answer.prepared:
                await answer.prepare(http)
            await answer.write(line.encode())

    try:
        for index in range(request.choices):
            stream, turn = begin()
            is_over = False
            while not is_over:
                coming = asyncio.ensure_future(stream.drawn.wait())
                await asyncio.wait((turn, coming), timeout=WORD_EVERY_S, return_when=asyncio.FIRST_COMPLETED)
                coming.cancel()
                is_over, has_drawn = turn.done(), stream.drawn.is_set()
                has_piece = not is_over and stream.add_piece()
                if events is None and (has_piece or (is_over and turn.exception() is None)):
                    events = dialect.events(request, stream.name, stream.context, stream.opened)
                    await send(events.begin())
                if is_over and (error := turn.exception()) is not None:
                    if not answer.prepared:
                        raise error
                    events = events or dialect.events(request, stream.name, stream.context, stream.opened)
                    await send(events.failed(str(error)))
                    return answer
                if is_over and events is not None:
                    replies.append(turn.result())
                    await send(events.end(index, replies[-1]))
                elif has_piece and events is not None:
                    await send(events.piece(index, stream.pieces[-1]))
                elif not has_drawn:
                    await send((dialect.events.keep_alive,))
        assert events is not None
        await send(events.over(replies))
    except ConnectionError:  # the client has disconnected; the tokens generated for it belong to its row
        await asyncio.wait((turn,))
    return answer


def first_stop(text: str, stops: Sequence[str], begin: int = 0) -> int | None:
    """Return the first position from `begin` on of a stop text; None if there is none."""
    return min((position for stop in stops if (position := text.find(stop, begin)) >= 0), default=None)
