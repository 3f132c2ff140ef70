"""What trains and infers a role: the backend that the configuration names."""

from braidrl.config import Config
from braidrl.flow import Flow
from braidrl.models.backend import BACKENDS, BackendSpec, TrainingBackend
from braidrl.models.parallel.replicated import DataParallel
from braidrl.models.role_settings import backend_of
from braidrl.models.roles.base import RoleWorker
from braidrl.models.roles.decoder import DecoderWorker
from braidrl.models.roles.scalar import ScalarWorker


def make_worker(
    role: str, config: Config, flow: Flow, ranks: DataParallel | None = None, training: bool = True
) -> TrainingBackend:
    """Return the role's worker: with a scalar head where it gives values or scores, with an optimizer where the flow trains it.

    Without `training` it is a copy whose weights come from elsewhere.
    """
    trained = role in flow.trained_roles
    spec = BackendSpec(
        role, config, training and trained, role in flow.scalar_roles, trained and not training, ranks or DataParallel()
    )
    worker: TrainingBackend = BACKENDS.find(backend_of(role, config))(spec)
    return worker


def torch_backend(spec: BackendSpec) -> RoleWorker:
    """Return the backend on torch alone."""
    kind = ScalarWorker if spec.is_scalar else DecoderWorker
    return kind(spec.role, spec.config, spec.train, spec.ranks, is_copy=spec.is_copy)


def torch_worker(worker: TrainingBackend) -> RoleWorker:
    """Return the worker as the torch backend's, which alone can be moved, divided, followed and copied."""
    assert isinstance(worker, RoleWorker), f"check_backends lets {worker.role} have no other here"
    return worker
