"""Weights that engines ask for: each worker receives what it holds, and no process waits for one that is late or
gone.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from braidrl.cluster.ranks import run_ranks
from braidrl.cluster.world import Ranks
from braidrl.weights import collective, transfer
from braidrl.weights.boxes import Box
from braidrl.weights.collective import Incoming, OfferedWeights, TransferError, WeightOffer
from braidrl.weights.shards import WeightPart, full_parts
from tests.tiny import ROOT
from tests.weights import shared_stream

CPU = torch.device("cpu")
TIED = torch.arange(50, dtype=torch.float32).view(10, 5)
TENSORS = {
    "embedding": TIED,
    "norm": torch.tensor([1.5, -2.0, 3.0], dtype=torch.bfloat16),
    "scale": torch.tensor(0.25, dtype=torch.float64),
    "large": torch.arange(400, dtype=torch.int64).view(4, 100),
    "output": TIED,
}
SHAPES = {name: tensor.shape for name, tensor in TENSORS.items()}


@pytest.fixture
def offer() -> Iterator[WeightOffer]:
    with closing(WeightOffer(Ranks(), "127.0.0.1", 60.0, CPU)) as made:
        yield made


def kept(offer: WeightOffer, version: int = 1, tensors: dict[str, Tensor] = TENSORS) -> collective.OfferedWeights:
    return offer.keep(version, full_parts(tensors.items()))


def upper(name: str) -> Box:
    box = Box.whole(TENSORS[name].shape)
    return box.along(0, 0, box.sizes[0] // 2) if box.sizes else box


@pytest.mark.parametrize("limit", [128, 1 << 20])
def test_two_workers_receive_full_tensors_and_another_its_slices(
    offer: WeightOffer, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer.WeightTransfer.__init__, "__defaults__", (limit, None, None))
    source, result = kept(offer), [dict[str, Tensor](), dict[str, Tensor]()]
    own = {
        n: WeightPart([n], torch.zeros_like(upper(n).of(t)), (t.shape, upper(n)))
        for n, t in TENSORS.items()
        if n != "output"
    }
    own["embedding"].names.append("output")
    with source.request(3) as notice:
        threads = [
            threading.Thread(target=lambda n=n: result[n].update(Incoming(notice, n, CPU).tensors())) for n in (0, 1)
        ]
        for thread in threads:
            thread.start()
        Incoming(notice, 2, CPU).put_into(own, SHAPES)
        for thread in threads:
            thread.join(60)
    for tensors in result:
        assert tensors.keys() == TENSORS.keys()
        assert all(t.dtype == TENSORS[n].dtype and torch.equal(t, TENSORS[n]) for n, t in tensors.items())
    assert all(torch.equal(part.local, upper(name).of(TENSORS[name])) for name, part in own.items())


@pytest.mark.parametrize("limit", [256, 1 << 20])
def test_changed_values_alone_are_sent_to_a_worker_with_the_version_before(
    offer: WeightOffer, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer.WeightTransfer.__init__, "__defaults__", (limit, None, None))
    torch.manual_seed(0)
    first = {
        "weight": torch.randn(64, 32).bfloat16(),
        "scale": torch.tensor(0.25, dtype=torch.float64),
        "norm": torch.randn(16),
    }
    second = {name: tensor.clone() for name, tensor in first.items()}
    second["weight"][3, 5:9], second["weight"][60, 0], second["scale"] = (
        7.0,
        -second["weight"][60, 0],
        second["scale"] + 1,
    )
    third = {**second, "weight": torch.randn(64, 32).bfloat16()}
    sources = [kept(offer, version, own) for version, own in enumerate((first, second, third))]
    box = Box.whole((64, 32)).along(1, 4, 20)
    own = {
        **full_parts((n, torch.zeros_like(t)) for n, t in first.items()),
        "weight": WeightPart(["weight"], torch.zeros(64, 16), (torch.Size([64, 32]), box)),
    }
    sent = []
    for source, held, tensors in (
        (sources[0], None, first),
        (sources[1], sources[0], second),
        (sources[2], sources[1], third),
    ):
        before = offer.sent_bytes
        with source.request(1, held) as notice:
            Incoming(notice, 0, CPU).put_into(own)
        # The worker of another precision holds what the run's values become in it.
        assert torch.equal(own["weight"].local, box.of(tensors["weight"]).float())
        assert torch.equal(own["scale"].local, tensors["scale"]) and torch.equal(own["norm"].local, tensors["norm"])
        sent.append(offer.sent_bytes - before)
    assert sent[1] < sent[0] / 4 and sent[2] < sent[0] * 1.2, sent
    offer.forget(1)
    before = offer.sent_bytes
    with sources[2].request(1, sources[1]) as notice:
        Incoming(notice, 0, CPU).put_into(own)
    assert offer.sent_bytes - before == sent[0], "the senders no longer have the version that the worker holds"


def test_versions_are_served_until_they_are_forgotten_or_changed(offer: WeightOffer) -> None:
    first, second = kept(offer, 1), kept(offer, 2, {"norm": torch.ones(3)})
    assert torch.equal(dict(first.tensors())["norm"], TENSORS["norm"])
    assert torch.equal(dict(second.tensors())["norm"], torch.ones(3))
    offer.forget(1)
    with pytest.raises(TransferError, match="have changed since that version"):
        dict(first.tensors())
    current = True
    third = offer.keep(3, full_parts(TENSORS.items()), lambda: current)
    assert len(dict(third.tensors())) == len(TENSORS)
    current = False
    with pytest.raises(TransferError, match="have changed since that version"):
        dict(third.tensors())


def test_a_sender_waits_for_a_version_that_other_senders_have_already(offer: WeightOffer) -> None:
    """Numbers of versions do not grow: under streaming they are random."""
    earlier = kept(offer, 7, {"norm": torch.zeros(3)})
    late = threading.Timer(0.3, kept, (offer, 5, {"norm": torch.ones(3)}))
    late.start()
    assert torch.equal(dict(replace(earlier, version=5).tensors())["norm"], torch.ones(3))
    late.join()


def test_another_models_worker_refuses_the_weights_and_keeps_its_own(offer: WeightOffer) -> None:
    own = full_parts({"norm": torch.zeros(3)}.items())
    with (
        kept(offer).request(1) as notice,
        pytest.raises(ValueError, match="not those of this model"),
    ):
        Incoming(notice, 0, CPU).put_into(own, {"norm": torch.Size([3])})
    assert not own["norm"].local.any()
    assert len(dict(kept(offer).tensors())) == len(TENSORS), "the next engine is served"


def test_missing_worker_is_waited_for_only_until_the_time_limit() -> None:
    with closing(WeightOffer(Ranks(), "127.0.0.1", 0.5, CPU)) as offer:
        source = kept(offer)
        with (
            source.request(2) as notice,
            pytest.raises(TransferError, match=r"2 of 3 processes .*0.5 s"),
        ):
            dict(Incoming(notice, 0, CPU).tensors())


def test_a_request_that_is_given_up_holds_nothing_up(offer: WeightOffer) -> None:
    source = kept(offer)
    start = time.monotonic()
    with pytest.raises(KeyError), source.request(1):
        raise KeyError
    # A process that dies as it asks leaves a number without content.
    source.store().add("asked", 1)
    assert len(dict(source.tensors())) == len(TENSORS)
    assert time.monotonic() - start < 30


def test_a_worker_that_dies_between_its_request_and_the_transfer_holds_nothing_up(offer: WeightOffer) -> None:
    source, start = kept(offer), time.monotonic()
    store = source.store()

    def die(number: int) -> None:
        store.add(f"{number}/here", 1)
        # The senders wait for the worker from here on.
        store.wait([f"{number}/joined"])
        raise KeyError

    with pytest.raises(KeyError), source.request(1) as notice:
        die(notice.number)
    assert len(dict(source.tensors())) == len(TENSORS)
    assert time.monotonic() - start < 30


def test_engines_that_ask_together_share_a_transfer_and_a_late_one_is_served_alone(
    offer: WeightOffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collective, "JOIN_S", 0.3)
    source, numbers = kept(offer), []
    joined = collective.transfer_group

    def counted(store: Any, *about: Any) -> Any:
        numbers.append(about[1])
        return joined(store, *about)

    monkeypatch.setattr(collective, "transfer_group", counted)
    with source.request(1) as first, source.request(1) as second, source.request(1) as late:
        other = threading.Thread(target=lambda: dict(Incoming(second, 0, CPU).tensors()))
        other.start()
        assert len(dict(Incoming(first, 0, CPU).tensors())) == len(TENSORS)
        other.join(60)
        assert len(dict(Incoming(late, 0, CPU).tensors())) == len(TENSORS)
    assert sorted(numbers) == [2, 2, 3, 3, 3], "processes of each transfer, the sender's and the workers'"


def test_worker_dying_during_transfer_does_not_block_the_next(offer: WeightOffer) -> None:
    # More than the sockets have room for, so that the sender has to wait for a worker that does not read.
    source = kept(offer, 1, {str(number): torch.zeros(1 << 22) for number in range(8)})
    with source.request(1) as notice:
        worker = multiprocessing.get_context("forkserver").Process(target=die_after_one, args=(notice,))
        worker.start()
        worker.join(300)
    assert worker.exitcode == -signal.SIGKILL
    start = time.monotonic()
    assert len(dict(source.tensors())) == 8
    assert time.monotonic() - start < 50


def die_after_one(notice: dict[str, Any]) -> None:
    next(Incoming(notice, 0, CPU).tensors())
    os.kill(os.getpid(), signal.SIGKILL)


def test_senders_that_die_during_a_transfer_are_an_error_of_the_transfer() -> None:
    """The store dies with the first sender, so that the reason for the failure cannot be read there."""
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe()
    sender = context.Process(target=offer_large_tensors, args=(theirs,))
    sender.start()
    source = OfferedWeights(**ours.recv())

    def receive() -> None:
        with source.request(1) as notice:
            for _ in Incoming(notice, 0, CPU).tensors():
                sender.kill()
                sender.join()

    with pytest.raises(TransferError, match="weights did not arrive"):
        receive()
    with pytest.raises(TransferError, match="weights did not arrive"), source.request(1):
        pass


def offer_large_tensors(ready: Any) -> None:
    offer = WeightOffer(Ranks(), "127.0.0.1", 2.0, CPU)
    source = kept(offer, 1, {str(number): torch.zeros(1 << 22) for number in range(8)})
    ready.send(asdict(source))
    time.sleep(300)


@pytest.mark.soak
def test_two_engines_of_a_node_share_one_stream_from_another_node() -> None:
    """Two trainer ranks, and two engines of two tensor ranks, one of them in another precision."""
    apart, shared = run_ranks("tests.weights.shared_stream:take_part", {"nodes": ["AABCDE", "AABBBB"]}, 6, 60.0)
    every = shared_stream.tensors(1)
    size, vectors = sum(tensor.nbytes for tensor in every.values()), every["norm"].nbytes
    assert apart["differs"] == shared["differs"] == []
    assert (apart["sent"][0], shared["sent"][0]) == (2 * size + 2 * vectors, size)
    assert shared["received"][0] == apart["received"][0] == 2 * size + 2 * vectors
    assert shared["sent"][1] < shared["sent"][0] / 2, "changed values alone are passed on"
    assert 0.9 < 2 * shared["sent"][1] / apart["sent"][1] < 1.1
    assert shared["counted"] == shared["received"][1], "the first sender asks for both engines"


def test_all_ranks_of_a_model_receive_their_slices_of_an_offered_version() -> None:
    assert run_ranks("tests.weights.shared_stream:put_into_slices", {}, 2, 60.0) == []


MACHINES = """
net=braid-$$
trap "ip netns del $net-0; ip netns del $net-1" EXIT
ip netns add $net-0 && ip netns add $net-1 && ip link add e0 netns $net-0 type veth peer name e1 netns $net-1 || exit 77
for n in 0 1; do
    ip -n $net-$n address add 10.77.0.$((n + 1))/24 dev e$n && ip -n $net-$n link set lo up || exit 77
    ip -n $net-$n link set e$n up || exit 77
done
ip netns exec $net-1 $PYTHON -m tests.weights.on_machines 1 > /dev/null &
ip netns exec $net-0 $PYTHON -m tests.weights.on_machines 0
"""


@pytest.mark.soak
def test_ranks_of_two_machines_send_their_parts() -> None:
    environment = {**os.environ, "PYTHON": sys.executable, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        ["bash", "-c", MACHINES], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200
    )
    if done.returncode == 77:
        pytest.skip(f"networks of its own need root and iproute2: {done.stderr}")
    assert done.stdout == f"{torch.arange(8.0).tolist()}\n", done.stderr
