"""The embedded engine of ranks that divide one model: each has its slices, and together they decode the rows of all.

rank 0   its requests ╮                ╭─ step, step, step ... ─▶ its responses
rank 1   its requests ┴▶ those of all ─┴─ step, step, step ... ─▶ its responses        within a step they meet in each layer

Drawing is deterministic: ranks that have the same requests in the same order draw the same tokens, and none has to lead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import msgpack
import torch.distributed as dist
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from braidrl.models.parallel.decoding import Slices
from braidrl.models.parallel.messages import gathered
from braidrl.rollout.embedded.engine import EmbeddedEngine
from braidrl.rollout.requests import Request, Response, Uid
from braidrl.rollout.wire import plain_request, request_of


class PooledEngine(EmbeddedEngine):
    """One rank's part. All ranks of the group make the same calls at the same time, also those without a request."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        slots: int,
        max_sequence_tokens: int,
        seed: int,
        slices: Slices,
        group: dist.ProcessGroup,
        compile: bool = True,
    ) -> None:
        """`slices` says which part of the whole `model` is; the other settings are the same on all ranks."""
        super().__init__(model, tokenizer, slots, max_sequence_tokens, seed, compile=compile, slices=slices)
        self.slices, self._group = slices, group

    def generate(
        self,
        requests: Iterable[Request],
        on_finished: Callable[[Response], None] | None = None,
        to_end: Callable[[], Iterable[Uid]] | None = None,
    ) -> list[Response]:
        """All of this rank's responses, in the order of `requests`. Rows that any rank has `to_end` end in the same step on all."""
        own = list(requests)
        uids = {request.uid for request in own}
        said = self._of_all([to_end is not None, [plain_request(request) for request in own]])
        pooled = [request_of(plain) for _, asked in said for plain in asked]
        # Asked of everybody after each step, and only where somebody may end rows.
        ends = self._ending(to_end) if any(may_end for may_end, _ in said) else None

        def tell(finished: Response) -> None:
            if on_finished is not None and finished.uid in uids:
                on_finished(finished)

        found = {finished.uid: finished for finished in super().generate(pooled, tell, ends)}
        return [found[request.uid] for request in own]

    def _ending(self, to_end: Callable[[], Iterable[Uid]] | None) -> Callable[[], list[Uid]]:
        """What all ranks have to end, asked by all at the same time."""

        def ending() -> list[Uid]:
            named = self._of_all(list(to_end() if to_end else ()))
            return list(dict.fromkeys(tuple(uid) for part in named for uid in part))

        return ending

    def _of_all(self, value: Any) -> list[Any]:
        """What every rank says, in the order of ranks."""
        return [msgpack.unpackb(part) for part in gathered(bytearray(msgpack.packb(value)), self._group)]
