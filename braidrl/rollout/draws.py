"""What has to be told to draw a row's tokens inside an engine that is not Braid's: the row's random key and how it samples."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from braidrl.rollout.requests import Request, SamplingParams

ARGUMENT = "braid"
"""Under which a request's draws are among vLLM's extra arguments."""


@dataclass(frozen=True)
class Draws:
    """One row's random key, the number of its first draw, and how it samples."""

    key: int
    first: int
    sampling: SamplingParams

    def arguments(self) -> dict[str, str]:
        """As text under a name of its own: what passes through any engine and any server."""
        return {ARGUMENT: json.dumps(asdict(self))}


def draws_of(request: Request, seed: int) -> Draws:
    """What a request's row draws in a run with this seed."""
    return Draws(request.key(seed), request.first_draw, request.sampling)


def draws_from(arguments: Mapping[str, Any] | None) -> Draws:
    """The reverse of `Draws.arguments`. Raises ValueError where these are not a request of Braid's."""
    if not arguments or ARGUMENT not in arguments:
        raise ValueError(
            "this engine draws tokens for Braid alone: ask it through `braid train` with rollout.engine=http"
        )
    plain = json.loads(arguments[ARGUMENT])
    lists: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in plain["sampling"].items()
    }
    return Draws(plain["key"], plain["first"], SamplingParams(**lists))
