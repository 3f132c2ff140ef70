"""The embedded engine of ranks that divide one model: each has its slices, and together they decode the rows of all.

rank 0   its requests ╮                ╭─ step, step, step ... ─▶ its responses
rank 1   its requests ┴▶ those of all ─┴─ step, step, step ... ─▶ its responses        within a step they meet in each layer

Drawing is deterministic: ranks that have the same requests in the same order draw the same tokens, and none has to lead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgpack
import torch.distributed as dist
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from braidrl.models.divided import Slices
from braidrl.models.messages import gathered
from braidrl.rollout.embedded import EmbeddedEngine
from braidrl.rollout.requests import Finished, Request, Uid
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
        on_finished: Callable[[Finished], None] | None = None,
        to_end: Callable[[], Iterable[Uid]] | None = None,
    ) -> list[Finished]:
        """All of this rank's responses, in the order of `requests`; what ends rows early on one rank alone is not for ranks in step."""
        assert to_end is None, "rows of ranks that decode together end by themselves"
        own = list(requests)
        uids = {request.uid for request in own}

        def tell(finished: Finished) -> None:
            if on_finished is not None and finished.uid in uids:
                on_finished(finished)

        found = {finished.uid: finished for finished in super().generate(self._pooled(own), tell)}
        return [found[request.uid] for request in own]

    def _pooled(self, own: list[Request]) -> list[Request]:
        """The requests of all ranks, in the order of ranks."""
        message = bytearray(msgpack.packb([plain_request(request) for request in own]))
        return [request_of(plain) for part in gathered(message, self._group) for plain in msgpack.unpackb(part)]
