"""Generation over the engines of all ranks: waiting rows move to ranks with free slots.

rank 0   requests ─▶ engine: running rows, waiting rows ──lent──▶ mail ──▶ rank 1's engine, which has free slots
rank 0   ◀──────────────── responses, as if drawn here ◀── mail ◀────────────┘

The rounds of `EarlyStop` add up how many rows wait and how many slots are free. Only when both exist, the next round
has these numbers for each rank, and all ranks derive the same moves from them. A row still belongs to its rank, with
its checks, columns and all later stages. Draws belong to the row, so no result depends on these moves.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch.distributed as dist

from braidrl.cluster.process_groups import has_message, message_at, put_message
from braidrl.cluster.world import Ranks, World
from braidrl.data.rows import Uid
from braidrl.engines.requests import Changes, EngineRow, Request, Response
from braidrl.engines.routing.router import RoleEngine

LOOK_EVERY_S = 0.02
"""Seconds between two looks at the mail."""


@dataclass(frozen=True)
class Move:
    """Waiting rows that one rank lends to another."""

    lender: int
    borrower: int
    rows: int


def skimmed(amounts: Sequence[int], count: int) -> list[int]:
    """Return how much to take from each amount, `count` in total, so that the largest remainder is smallest."""
    order = sorted(range(len(amounts)), key=lambda i: (-amounts[i], i))
    amounts_taken, total = [0] * len(amounts), 0
    for largest, i in enumerate(order, 1):
        total += amounts[i]
        following = amounts[order[largest]] if largest < len(order) else 0
        if total - largest * following >= count:
            level, more = divmod(total - count, largest)
            for position, rank in enumerate(order[:largest]):
                amounts_taken[rank] = amounts[rank] - level - (position < more)
            break
    return amounts_taken


def planned_moves(waiting: Sequence[int], free: Sequence[int]) -> list[Move]:
    """Return the moves of waiting rows to free slots: from the ranks with the most, to the ranks with the most."""
    count = min(sum(waiting), sum(free))
    lent_rows, slots, moves = skimmed(waiting, count), skimmed(free, count), list[Move]()
    borrowers = (rank for rank, rows in enumerate(slots) for _ in range(rows))
    for lender, rows in enumerate(lent_rows):
        to = Counter(next(borrowers) for _ in range(rows))
        moves += [Move(lender, borrower, lent) for borrower, lent in to.items()]
    return moves


class Loans:
    """One rank's rows on other ranks' engines, and other ranks' rows on its engine, in one wave.

    Before `open` and after `close` it neither lends nor borrows.
    """

    def __init__(self, world: World, wave: int) -> None:
        self.world, self.wave = world, wave
        self.engine: RoleEngine | None = None
        self.requests: dict[Uid, Request] = {}
        self.on_returned: Callable[[Response], None] = lambda response: None
        self.lent: dict[Uid, int] = {}
        """The borrower of each row that has not come back."""
        self.returned: dict[Uid, Response] = {}
        self.borrowed: dict[Uid, tuple[int, Request]] = {}
        """The lender and the request of each row that this rank's engine has of another."""
        self.drawn: list[tuple[Request, Response]] = []
        """What this rank's engine has drawn for others."""
        self.finished: dict[int, list[Response]] = {}
        """Borrowed rows that have ended, by lender."""
        self.coming: dict[str, int] = {}
        """The messages of lenders that are on their way, and how many rows they have at most."""
        self.moves: list[Move] = []
        """Loans that this rank has still to make."""
        self.may_come = True
        """Whether some rank had waiting rows in the last round."""
        self.by_rank = False
        """Whether the next round has the numbers of each rank."""
        self.counts: Counter[str] = Counter()
        self.written: list[str] = []
        self._next = 0.0

    @property
    def mail(self) -> dist.Store:
        assert self.world.mail is not None, "ranks of a world meet at a store"
        return self.world.mail

    def open(self, engine: RoleEngine, requests: Iterable[Request], on_returned: Callable[[Response], None]) -> None:
        """Start to lend waiting rows of `requests`, which return through `on_returned`, and to borrow rows."""
        self.engine, self.on_returned = engine, on_returned
        self.requests = {request.uid: request for request in requests}

    def numbers(self) -> list[int]:
        """Return what this rank adds to a round: its waiting rows and free slots, with `each` at its rank's index."""
        rank, size = self.world.rank, self.world.size
        waiting = free = 0
        if self.engine is not None:
            waiting = max(0, len(self._waiting()) - sum(move.rows for move in self.moves))
            # One of the ranks that decode together offers their slots.
            if not self.engine.waiting and Ranks(self.engine.group).rank == 0:
                free = max(0, self.engine.slots - self.engine.in_flight - sum(self.coming.values()))
        by_rank = [0] * (2 * size if self.by_rank else 0)
        if by_rank:
            by_rank[rank], by_rank[size + rank] = waiting, free
        return [waiting, free, *by_rank]

    def take(self, totals: Sequence[int]) -> None:
        """Process the sums of a round over all ranks' `numbers`."""
        waiting, free, *by_rank = totals
        self.may_come, self.by_rank = waiting > 0, waiting > 0 and free > 0
        if by_rank and self.engine is not None:
            for move in planned_moves(by_rank[: self.world.size], by_rank[self.world.size :]):
                if self.world.rank == move.lender:
                    self.moves.append(move)
                elif self.world.rank == move.borrower:
                    self.coming[self._key("lent", move.lender, move.borrower)] = move.rows

    def changes(self, ended: Sequence[Uid], is_over: bool) -> Changes:
        """Return the changes for the engine: rows of this rank that end now, rows lent, and rows borrowed.

        If the wave `is_over` no row of any rank is needed any more.
        """
        if is_over:
            self._forget()
            return Changes([*ended, *self.borrowed])
        leaving = [uid for move in self.moves for uid in self._lend(move)]
        self.moves = []
        added = list[Request]()
        if leaving or time.monotonic() >= self._next:
            self._next = time.monotonic() + LOOK_EVERY_S
            added = self._borrow()
            self._give_back()
            self._take_back()
        more = bool(self.lent or self.coming or self.finished or self.may_come)
        return Changes([*ended, *leaving], added, more)

    def ended(self, response: Response) -> bool:
        """Process the result of a borrowed row; return False for a row of this rank, which the caller handles."""
        if response.uid not in self.borrowed:
            # A row that ends while it is lent comes back with the same tokens.
            return response.uid in self.lent
        lender, request = self.borrowed.pop(response.uid)
        self.drawn.append((request, response))
        self.finished.setdefault(lender, []).append(response)
        return True

    def close(self) -> None:
        """End the wave on this rank: it neither lends nor borrows any more."""
        self.engine = None

    def clear_mail(self) -> None:
        """Delete this rank's messages after the last round, when no rank reads them."""
        for key in self.written:
            self.mail.delete_key(key)

    def _waiting(self) -> list[Uid]:
        assert self.engine is not None
        return [uid for uid in self.engine.waiting_rows() if uid in self.requests and uid not in self.lent]

    def _lend(self, move: Move) -> list[Uid]:
        """Send this rank's last waiting rows, some of which may have started since the round; return the rows sent."""
        uids = self._waiting()[-move.rows :]
        self._put(self._key("lent", move.lender, move.borrower), [self.requests[uid] for uid in uids])
        self.lent |= dict.fromkeys(uids, move.borrower)
        return uids

    def _borrow(self) -> list[Request]:
        requests = list[Request]()
        for key in list(self.coming):
            if has_message(self.mail, key):
                del self.coming[key]
                lender, lent = int(key.split("/")[2]), message_at(self.mail, key, list[Request])
                self.borrowed |= {request.uid: (lender, request) for request in lent}
                requests += lent
        if requests and (elastic := self.world.elastic) is not None:
            elastic.work_on([*elastic.in_work, *(request.uid for request in requests)])
        return requests

    def _give_back(self) -> None:
        for lender, responses in self.finished.items():
            self._put(self._key("back", self.world.rank, lender), responses)
        self.finished = {}

    def _take_back(self) -> None:
        for borrower in set(self.lent.values()):
            name = f"back/{borrower}/{self.world.rank}"
            while has_message(self.mail, f"{self.wave}/{name}/{self.counts[name] + 1}"):
                responses = message_at(self.mail, self._key("back", borrower, self.world.rank), list[Response])
                for response in responses:
                    del self.lent[response.uid]
                    self.returned[response.uid] = response
                    self.on_returned(response)

    def _forget(self) -> None:
        """Forget rows that are not needed: lent rows end without tokens."""
        for uid in self.lent:
            request = self.requests[uid]
            self.returned[uid] = EngineRow(request, request.sampling.max_tokens).finished(aborted=True)
        self.lent, self.coming, self.finished, self.moves = {}, {}, {}, []

    def _key(self, name: str, sender: int, receiver: int) -> str:
        """Return the key of the next message between two ranks; both count messages."""
        kind = f"{name}/{sender}/{receiver}"
        self.counts[kind] += 1
        return f"{self.wave}/{kind}/{self.counts[kind]}"

    def _put(self, key: str, value: list[Request] | list[Response]) -> None:
        put_message(self.mail, key, value)
        self.written.append(key)
