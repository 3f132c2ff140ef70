"""The prompts of an embedded engine's waiting rows: each is computed once for all rows that start with it.

waiting rows ─▶ missing prompts, packed ─▶ model ─▶ keys, values and routes of each prompt ─▶ the slots of its rows

A pass over few tokens also computes the prompts of the rows that get a slot next: it takes little longer.

All ids of a prompt except the last go through the model here; a slot decodes the last one first. So every token is
drawn in a decode step, at the shape that all rows share.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

from torch import Tensor
from transformers import PreTrainedModel

from braidrl.engines.embedded.adapters import PolicyAdapters
from braidrl.engines.embedded.slot_states import ROW_MULTIPLE
from braidrl.engines.requests import Request
from braidrl.training.compute.slots import Prefix, round_up
from braidrl.training.decoders.body import prefill
from braidrl.training.decoders.images import ModelImages
from braidrl.training.decoders.routing import Routing, routed, routes_dtype

PREFILL_TOKENS = 8192
"""Prompt tokens in one forward pass; a longer prompt goes alone."""
AHEAD_TOKENS = 512
"""Prompt tokens up to which the prompts of rows without a slot are computed in the same pass."""


def prompt_key(request: Request) -> bytes:
    """Return a key that requests of one policy with the same prompt, and the same images in it, share."""
    return b"".join(
        [
            f"{request.policy};".encode(),
            *(f"{span.name}@{span.start};".encode() for span in request.images),
            request.prompt.numpy().tobytes(),
        ]
    )


def adapted(
    adapters: PolicyAdapters | None, policies: Sequence[str | None], lengths: Sequence[int]
) -> AbstractContextManager[None]:
    """Return a context for a pass over runs of tokens of these policies, padded to a multiple of rows."""
    if adapters is None:
        return nullcontext()
    return adapters.computing(policies, lengths, -sum(lengths) % ROW_MULTIPLE)


@dataclass
class Prompts:
    """The prompts of waiting rows, by their `prompt_key`: each is computed once for all its rows, of any group."""

    prefixes: dict[bytes, Prefix] = field(default_factory=dict)
    """Keys and values of each computed prompt, except its last token; kept until the last of its rows has a slot."""
    routes: dict[bytes, Tensor] = field(default_factory=dict)
    """The experts of the same tokens, (P - 1, L, k), if rows request them."""
    waiting: Counter[bytes] = field(default_factory=Counter)
    """The number of waiting rows with each prompt."""
    computed_tokens: int = 0
    _next: dict[bytes, Request] = field(default_factory=dict)
    """A waiting row of each prompt, in the order in which prompts arrived."""

    def expect(self, request: Request, rows: int = 1) -> None:
        """Change the number of waiting rows of a prompt; free its keys and values after the last row."""
        name = prompt_key(request)
        self.waiting[name] += rows
        self._next.setdefault(name, request)
        if not self.waiting[name]:
            del self.waiting[name], self._next[name]
            self.prefixes.pop(name, None)
            self.routes.pop(name, None)

    def clear(self) -> None:
        """Forget what was computed."""
        self.prefixes.clear()
        self.routes.clear()

    def forget_rows(self) -> None:
        """Forget the waiting rows, and what was computed."""
        self.clear()
        self.waiting.clear()
        self._next.clear()

    def compute(
        self,
        model: PreTrainedModel,
        requests: Mapping[bytes, Request],
        images: ModelImages | None = None,
        with_routes: bool = False,
        adapters: PolicyAdapters | None = None,
    ) -> None:
        """Compute the missing keys and values of prompts, several in one packed forward pass."""
        missing = self._missing(requests, with_routes)
        parts: list[dict[bytes, Tensor]] = []
        count = PREFILL_TOKENS
        for name, request in missing.items():
            ids = request.prompt[:-1]
            if round_up(count + len(ids), ROW_MULTIPLE) > PREFILL_TOKENS:
                parts.append({})
                count = 0
            parts[-1][name] = ids
            count += len(ids)
        for part in parts:
            prompts, lengths = list(part.values()), [len(ids) for ids in part.values()]
            spans = [missing[name].images for name in part]
            placed_images = None if images is None else images.of_prompts(prompts, spans)
            routing = Routing() if with_routes else None
            policies = [missing[name].policy for name in part]
            with routed(routing), adapted(adapters, policies, lengths):
                self.prefixes |= dict(zip(part, prefill(model, prompts, ROW_MULTIPLE, placed_images), strict=True))
            if routing is not None:
                routes = routing.recorded().to(routes_dtype(model)).cpu()[: sum(lengths)]
                self.routes |= dict(zip(part, routes.split(lengths), strict=True))
            self.computed_tokens += sum(lengths)

    def _missing(self, requests: Mapping[bytes, Request], with_routes: bool) -> dict[bytes, Request]:
        """Return the prompts that are not computed; where they are short, with those of the next waiting rows."""

        def is_missing(name: bytes, request: Request) -> bool:
            is_known = name in self.prefixes and (name in self.routes or not with_routes)
            return not is_known and len(request.prompt) > 1

        missing = {name: request for name, request in requests.items() if is_missing(name, request)}
        count = sum(len(request.prompt) for request in missing.values())
        for name, request in self._next.items() if missing else ():
            if name not in missing and is_missing(name, request):
                count += len(request.prompt)
                if count > AHEAD_TOKENS:
                    break
                missing[name] = request
        return missing
