"""What over-sampling and partial rollouts need: which rows may be ended early, and how an ended row goes on later.

groups   0 kept   1 dropped   2 kept   3 kept   4 ...      two are wanted: 0 and 2 are the batch whatever comes,
                                       └──────────┴─ so these may be aborted; what they have can be continued
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

import torch

from braidrl.data.rows import FinishReason
from braidrl.rollout.requests import Finished, Request


def groups_to_abort(under_way: Iterable[int], decided: Mapping[int, bool], wanted: int) -> list[int]:
    """Groups that cannot be in the batch any more, of those under way, ascending.

    `decided` says of each finished group whether it is kept. The batch is the first `wanted` kept groups by number, never by who
    was first: a group may end early only when all those before it are decided and enough of them kept.
    """
    left = sorted(set(under_way) - decided.keys())
    kept = 0
    for group in sorted({*left, *decided}):
        if group not in decided:
            return []
        kept += decided[group]
        if kept == wanted:
            return [later for later in left if later > group]
    return []


def continued(request: Request, ended: Finished) -> Request | None:
    """What draws the rest of a row that was aborted, with the random numbers that come next; None when nothing is left to draw.

    Raises ValueError for a response of another row.
    """
    if ended.uid != request.uid:
        raise ValueError(f"row {request.uid} cannot go on from what row {ended.uid} has")
    left = request.sampling.max_tokens - len(ended.tokens)
    if ended.finish_reason is not FinishReason.ABORT or left < 1:
        return None
    return replace(
        request,
        prompt=torch.cat([request.prompt, ended.tokens]),
        sampling=replace(request.sampling, max_tokens=left),
        first_draw=request.first_draw + len(ended.tokens),
    )


def joined(ended: Finished, rest: Finished) -> Finished:
    """The whole response of a row that was drawn in two parts; each token keeps the version that drew it."""
    if ended.uid != rest.uid:
        raise ValueError(f"rows {ended.uid} and {rest.uid} are two")
    log_probs = torch.cat([ended.log_probs.to(rest.log_probs.dtype), rest.log_probs])
    return Finished(
        rest.uid,
        torch.cat([ended.tokens, rest.tokens]),
        log_probs,
        rest.finish_reason,
        torch.cat([ended.versions, rest.versions]),
    )
