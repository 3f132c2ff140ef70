"""The contract of training backends: checks for ours, in each layout, and for those that users write.

    for check in CHECKS:
        check(subject)          on every rank of the role, at the same time

A check fails by AssertionError.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from braidrl.data.rows import Rows
from braidrl.observe.metrics import Sums
from braidrl.training.backends import TrainingBackend
from braidrl.training.objective import Objective
from braidrl.training.optimizer import StepOverrides

TOLERANCE = 1e-9


@dataclass(frozen=True)
class BackendUnderTest:
    """A backend under test in float64, and this rank's part of the test's data."""

    make: Callable[[], TrainingBackend]
    """Makes a backend with the same weights each time, and a fresh optimizer."""
    objective: Objective
    rows: Rows
    """This rank's rows; some ranks should have none."""
    counts: Mapping[str, float]
    """Loss denominators over the rows of all ranks."""
    folder: Path
    """An empty folder, the same for all ranks."""
    meet: Callable[[], object]
    """A barrier over all ranks."""
    first: bool
    """True on one rank."""

    def log_probs(self, backend: TrainingBackend) -> Tensor:
        return backend.forward("log_probs", self.rows).values

    def step(self, backend: TrainingBackend, iteration: int = 1) -> float | None:
        """Run one optimizer step on all rows; return the gradient's 2-norm before clipping, or None without counts."""
        backend.forward_backward(self.objective, self.rows, Sums())
        return backend.optim_step(self.counts, iteration)


same = partial(torch.testing.assert_close, rtol=TOLERANCE, atol=TOLERANCE)


def rows_keep_their_order(subject: BackendUnderTest) -> None:
    backend, order = subject.make(), list(reversed(range(len(subject.rows))))
    turned = backend.forward("log_probs", subject.rows.take(order))
    expected = backend.forward("log_probs", subject.rows)
    assert len(expected) == len(subject.rows)
    for position, row in enumerate(order):
        same(turned[position], expected[row])


def a_batch_may_arrive_in_pieces(subject: BackendUnderTest) -> None:
    undivided, portions = subject.make(), subject.make()
    half = len(subject.rows) // 2
    losses = undivided.forward_backward(subject.objective, subject.rows, Sums())
    first = portions.forward_backward(subject.objective, subject.rows.take(list(range(half))), Sums())
    rest = portions.forward_backward(subject.objective, subject.rows.take(list(range(half, len(subject.rows)))), Sums())
    for name, loss in losses.items():
        same(first.get(name, 0.0) + rest.get(name, 0.0), loss)
    same(portions.optim_step(subject.counts, 1), undivided.optim_step(subject.counts, 1))
    same(subject.log_probs(portions), subject.log_probs(undivided))


def nothing_counted_changes_nothing(subject: BackendUnderTest) -> None:
    backend = subject.make()
    before = subject.log_probs(backend)
    backend.forward_backward(subject.objective, subject.rows, Sums())
    assert backend.optim_step(dict.fromkeys(subject.counts, 0.0), 1) is None
    same(subject.log_probs(backend), before)
    same(subject.step(backend), subject.step(subject.make()))


def a_step_changes_the_weights_on_every_rank(subject: BackendUnderTest) -> None:
    backend = subject.make()
    before = subject.log_probs(backend)
    norm = subject.step(backend)
    after = subject.log_probs(backend)
    assert norm is not None and norm > 0
    assert not len(subject.rows) or not torch.equal(after, before)


def a_step_may_have_its_own_learning_rate(subject: BackendUnderTest) -> None:
    backend = subject.make()
    before = subject.log_probs(backend)
    backend.forward_backward(subject.objective, subject.rows, Sums())
    norm = backend.optim_step(subject.counts, 1, StepOverrides(learning_rate=0.0))
    assert norm is not None and norm > 0
    same(subject.log_probs(backend), before)


def training_continues_identically_after_export_and_load(subject: BackendUnderTest) -> None:
    backend, loaded = subject.make(), subject.make()
    subject.step(backend)
    backend.export(subject.folder, subject.first)
    subject.meet()
    loaded.load(subject.folder)
    same(subject.log_probs(loaded), subject.log_probs(backend))
    same(subject.step(loaded, 2), subject.step(backend, 2))
    same(subject.log_probs(loaded), subject.log_probs(backend))


CHECKS: tuple[Callable[[BackendUnderTest], None], ...] = (
    rows_keep_their_order,
    a_batch_may_arrive_in_pieces,
    nothing_counted_changes_nothing,
    a_step_changes_the_weights_on_every_rank,
    a_step_may_have_its_own_learning_rate,
    training_continues_identically_after_export_and_load,
)
