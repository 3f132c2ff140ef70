"""Which kind of worker a role of a flow needs."""

from __future__ import annotations

from braidrl.config import Config
from braidrl.flow import Flow
from braidrl.models.parallel.replicated import DataParallel
from braidrl.models.roles.base import RoleWorker
from braidrl.models.roles.decoder import DecoderWorker
from braidrl.models.roles.scalar import ScalarWorker


def make_worker(
    role: str, config: Config, flow: Flow, ranks: DataParallel | None = None, training: bool = True
) -> RoleWorker:
    """The role's worker: with a scalar head where it gives values or scores, with an optimizer where the flow trains it.

    Without `training` it is a copy whose weights come from elsewhere.
    """
    kind = ScalarWorker if role in flow.scalar_roles else DecoderWorker
    trained = role in flow.trained_roles
    return kind(role, config, training and trained, ranks, copies=trained and not training)
