"""What partial rollouts need: how a row that was ended early goes on later, with the random numbers that come next."""

from __future__ import annotations

from dataclasses import replace

import torch

from braidrl.data.rows import FinishReason
from braidrl.rollout.requests import Request, Response


def continued(request: Request, ended: Response) -> Request | None:
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


def joined(ended: Response, rest: Response) -> Response:
    """The whole response of a row that was drawn in two parts; each token keeps the version that drew it."""
    if ended.uid != rest.uid:
        raise ValueError(f"rows {ended.uid} and {rest.uid} are two")
    log_probs = torch.cat([ended.log_probs.to(rest.log_probs.dtype), rest.log_probs])
    return Response(
        rest.uid,
        torch.cat([ended.tokens, rest.tokens]),
        log_probs,
        rest.finish_reason,
        torch.cat([ended.versions, rest.versions]),
    )
