"""The transfer queue with real sockets and shared memory: what is put is got, once, and leaves no trace."""

from __future__ import annotations

import gc
import multiprocessing
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from braidrl.algorithms import registry
from braidrl.algorithms.ragged import Ragged
from braidrl.data.codec import encode
from braidrl.data.messages import unpack_message
from braidrl.flow import Flow, Kind, Scope, Stage
from braidrl.flow.batches import Sizes
from braidrl.queue.calls import Done, Free, Hello, Lost, ReadRows, Renew, Stop, Waited
from braidrl.queue.client import Client, DataPlane, Evicted, WorkItem, assembled, write_columns
from braidrl.queue.owner import StorageNode, remove_abandoned
from braidrl.queue.storage import Place, Segments
from braidrl.queue.transport import Connection, QueueError, QueueTimeout
from braidrl.runtimes.streaming.control import ControlPlane
from braidrl.runtimes.streaming.stream import Stream
from braidrl.runtimes.streaming.work import (
    Ended,
    Give,
    LeasedRows,
    Loaded,
    LoadWeights,
    Step,
    Stepped,
    TakeWork,
    WeightLocation,
    WeightsGiven,
)
from tests.queue.made_up import (
    CHECK,
    GENERATE,
    LOADED,
    NORMALISE,
    SAMPLES,
    UPDATE,
    Worker,
    admit,
    admit_over_the_wire,
    born,
    client,
    deliver,
    made_from,
    main_program,
    queue,
    serve,
    stage,
)


def test_every_column_of_every_stage_comes_back_as_it_was_put() -> None:
    with queue(iterations=2) as (control, server, node):
        worker = Worker(client(server, node, "worker", generates=True))
        stop = threading.Event()
        thread = threading.Thread(target=lambda: [worker.once(wait_s=0.05) for _ in iter(stop.is_set, True)])
        thread.start()
        finished = main_program(control, server, 2)
        stop.set()
        thread.join()
        final = finished[0].final
        rows = assembled(control.data, final.index, final.payload, len(final))
        expected = born([0, 1])
        for name in ("generate", "check"):
            expected = expected.with_columns(made_from(name, expected))
        assert rows.uids() == expected.uids()
        for name, column in expected.items():
            ours = rows[name]
            if isinstance(column, torch.Tensor):
                assert torch.equal(ours, column) and ours.dtype == column.dtype
            elif isinstance(column, Ragged):
                assert torch.equal(ours.values, column.values) and torch.equal(ours.offsets, column.offsets)
            else:
                assert ours.values == column.values
        assert "advantage" in rows and "prompt" in rows and "metadata" in rows
        worker.close()


def test_a_stage_gets_the_payload_that_it_reads_and_no_other() -> None:
    with queue() as (control, server, node):
        worker = client(server, node, "worker", generates=True)
        control.training.schedule.admission.groups_wanted(0)
        admit(control, [0, 1])
        work = worker.take(TakeWork(["generate"], 8), 0.0)
        assert list(work.read().payload) == ["prompt"]
        deliver(worker, work, made_from("generate", work.read()))
        assert list(worker.take(TakeWork(["check"], 8), 0.0).read().payload) == ["tokens"]
        worker.close()


def test_a_rank_that_gets_the_index_reads_the_blocks_of_its_rows_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    with queue(prompts=4) as (control, server, node):
        engines = [client(server, node, f"engine-{number}", generates=True) for number in range(4)]
        control.training.schedule.admission.groups_wanted(0)
        admit(control, range(4))
        for engine in engines:
            work = engine.take(TakeWork(["generate"], SAMPLES), 0.0)
            deliver(engine, work, made_from("generate", work.read()))
        leader = client(server, node, "leader")
        work = leader.take(TakeWork(["check"], 4 * SAMPLES, 2), 0.0)
        whole = work.read([2, 3])
        other, blocks = DataPlane(node.place(), "other", 10.0), set[str]()
        read = other.read_rows
        monkeypatch.setattr(other, "read_rows", lambda block, *named: blocks.add(block.name) or read(block, *named))
        passed_on = WorkItem(other, work.answer, work.inline)
        assert (
            len(passed_on.index) == 4 * SAMPLES and passed_on.index["length"].tolist() == work.index["length"].tolist()
        )
        rows = passed_on.read([2, 3])
        assert set(rows) == set(whole) and all(torch.equal(rows[name], whole[name]) for name in whole.index)
        assert torch.equal(rows["tokens"].values, whole["tokens"].values)
        assert len(blocks) == 1, "one engine of four has written its rows"
        for one in (*engines, leader):
            one.close()
        other.close()


def test_waiting_reader_does_not_block_and_is_served_promptly() -> None:
    with queue() as (control, server, node):
        reader, writer = client(server, node, "reader"), client(server, node, "writer", generates=True)
        got: list[tuple[type, float]] = []
        thread = threading.Thread(
            target=lambda: got.append((reader.take(TakeWork(["check"], 8), 60.0).kind, time.monotonic()))
        )
        thread.start()
        time.sleep(0.1)
        control.training.schedule.admission.groups_wanted(0)
        admit(control, [0, 1])
        start = time.monotonic()
        assert Worker(writer).once(["generate"]) is LeasedRows
        written = time.monotonic()
        thread.join()
        assert written - start < 30, "the writer was answered while the reader was waiting"
        assert got[0][0] is LeasedRows and got[0][1] - written < 30
        reader.close()
        writer.close()


def test_reader_is_answered_after_its_time_limit() -> None:
    with queue() as (_, server, node):
        worker = client(server, node, "worker")
        start = time.monotonic()
        assert worker.take(TakeWork(["check"], 8), 0.3).kind is Waited
        assert time.monotonic() - start >= 0.3
        worker.close()


def set_clock(control: ControlPlane) -> Callable[[float], None]:
    """Have a clock that stands; return what moves it on by some seconds."""
    seconds = [0.0]
    control.clock = lambda: seconds[0]

    def pass_by(more: float) -> None:
        seconds[0] += more

    return pass_by


def test_expired_lease_moves_on_and_late_answer_is_refused() -> None:
    with queue(lease_s=30.0) as (control, server, node):
        passed = set_clock(control)
        slow, quick = client(server, node, "slow", generates=True), client(server, node, "quick", generates=True)
        control.training.schedule.admission.groups_wanted(0)
        admit(control, [0, 1])
        work = slow.take(TakeWork(["generate"], 8), 0.0)
        rows = work.read()
        assert quick.take(TakeWork(["generate"], 8), 0.0).kind is Waited
        passed(31.0)
        again = quick.take(TakeWork(["generate"], 8), 60.0)
        assert again.read().uids() == rows.uids()
        assert deliver(slow, work, made_from("generate", rows)) == [work.lease]
        assert owner_names(node, "slow") == [], "what came too late takes no memory"
        assert deliver(quick, again, made_from("generate", rows)) == []
        slow.close()
        quick.close()


def test_slots_of_ended_rows_are_filled_before_these_rows_are_reported() -> None:
    with queue() as (control, server, node):
        control.change(lambda: control.training.schedule.admission.groups_wanted(0))
        admit(control, [1, 2])
        engine = client(server, node, "engine.0.0", generates=True)
        first = engine.take(TakeWork(["generate"], 8, slots=2), 0.0)
        assert first.size == 2 and engine.take(TakeWork(["generate"], 8, slots=2), 0.0).kind is Waited
        engine.tell(Ended([(first.lease, 2)]))
        second = engine.take(TakeWork(["generate"], 8, slots=2), 5.0)
        assert second.kind is LeasedRows and second.size == 2
        # The report of ended rows frees no slot a second time.
        deliver(engine, first, made_from("generate", first.read()))
        assert engine.take(TakeWork(["generate"], 8, slots=2), 0.0).kind is Waited
        engine.close()


def test_leases_of_an_evaluation_have_numbers_of_their_own() -> None:
    judged = Flow("judged", [stage("generate.judged", Kind.GENERATE, ("prompt",), ("tokens", "length", "version"))])
    with queue() as (control, server, node):
        control.change(lambda: control.training.schedule.admission.groups_wanted(0))
        admit(control, [1, 2])
        evaluation = Stream(judged, Sizes(1, 2, SAMPLES, 2 * SAMPLES), during=0, held=control.held)
        control.add_stream(evaluation)
        control.change(lambda: evaluation.schedule.admission.groups_wanted(0))
        control.admit(evaluation, control.held.hold_for(write_columns(control.data, dict(born([1, 2]).items()))))
        engine = client(server, node, "engine.0.0", generates=True)
        leases = [engine.take(TakeWork([name], 8), 5.0).lease for name in ("generate", "generate.judged")]
        assert len(set(leases)) == 2 and engine.held == set(leases)
        engine.close()


def test_a_worker_that_renews_keeps_its_rows() -> None:
    with queue(lease_s=30.0) as (control, server, node):
        passed = set_clock(control)
        slow, quick = client(server, node, "slow", generates=True), client(server, node, "quick", generates=True)
        control.training.schedule.admission.groups_wanted(0)
        admit(control, [0, 1])
        rows = (work := slow.take(TakeWork(["generate"], 8), 0.0)).read()
        for _ in range(5):
            passed(20.0)
            assert slow.renew() == Lost(lost=[], dropped=[])
        assert quick.take(TakeWork(["generate"], 8), 0.0).kind is Waited
        assert deliver(slow, work, made_from("generate", rows)) == []
        slow.close()
        quick.close()


def test_late_renewal_returns_lost_leases() -> None:
    with queue(lease_s=0.02) as (control, server, node):
        slow = client(server, node, "slow", generates=True)
        control.training.schedule.admission.groups_wanted(0)
        admit(control, [0, 1])
        lease = slow.take(TakeWork(["generate"], 8), 0.0).lease
        time.sleep(0.03)
        assert slow.renew() == Lost(lost=[lease], dropped=[]) and not slow.held
        slow.close()


def test_dead_worker_rows_are_leased_again_and_unreported_blocks_freed() -> None:
    with queue() as (control, server, node):
        dead, other = client(server, node, "dead", generates=True), client(server, node, "other", generates=True)
        control.training.schedule.admission.groups_wanted(0)
        admit(control, [0, 1])
        rows = dead.take(TakeWork(["generate"], 8), 0.0).read()
        write_columns(dead.data, made_from("generate", rows))
        assert len(owner_names(node, "dead")) == 1
        control.fail("dead")
        assert owner_names(node, "dead") == []
        assert other.take(TakeWork(["generate"], 8), 2.0).read().uids() == rows.uids()
        assert dead.take(TakeWork(["generate"], 8), 0.0).kind is Stop, "a dead worker's last request is given no rows"
        dead.close()
        other.close()


def owner_names(node: StorageNode, writer: str) -> list[str]:
    return Segments(node.run, "looker").names(writer)


def test_eviction_frees_the_memory_of_rows_that_are_done() -> None:
    with queue(iterations=4) as (control, server, node):
        worker = Worker(client(server, node, "worker", generates=True))
        stop = threading.Event()
        thread = threading.Thread(target=lambda: [worker.once(wait_s=0.05) for _ in iter(stop.is_set, True)])
        thread.start()
        finished = main_program(control, server, 4)
        stop.set()
        thread.join()
        assert control.training.table.parts and not any(control.training.table.parts.values())
        names = Segments(node.run, "looker").names()
        assert names, "finished iterations keep their payload until it has been read"
        finished.clear()
        gc.collect()
        control.change(lambda: None)
        assert Segments(node.run, "looker").names() == []
        worker.close()


def test_views_outlive_the_eviction_of_what_they_show() -> None:
    with queue() as (control, _, _):
        block = control.data.write(encode(born([3]).payload))
        rows = control.data.read_rows(block, ["prompt"])
        control.data.free([block])
        assert rows["prompt"].values.tolist() == [3] * 8
        with pytest.raises(Evicted):
            control.data.read_rows(block, ["prompt"])


@contextmanager
def two_nodes() -> Iterator[tuple[ControlPlane, Client, Client, StorageNode]]:
    """A queue on one node, with a worker there and an engine on another one."""
    with queue(iterations=1, host="node-a") as (control, server, own):
        node = StorageNode("node-b", "127.0.0.1")
        near = client(server, own, "near")
        far = Client(server.address, "far", DataPlane(node.place(), "far", 10.0), generates=True)
        control.training.schedule.admission.groups_wanted(0)
        admit(control, [0, 1])
        yield control, near, far, node
        near.close()
        far.close()
        node.close()
    assert Segments(node.run, "looker").names() == [] and not node.path.exists()


def test_two_nodes_exchange_only_requested_rows() -> None:
    with two_nodes() as (control, near, far, node):
        work = far.take(TakeWork(["generate"], 2), 0.0)
        assert work.read()["prompt"].values.tolist() == born([0])["prompt"].values.tolist()
        assert 0 < control.data.served < 8 * born([0, 1])["prompt"].values.numel() + 400, (
            "prompts of the other group came too"
        )
        rows = work.read()
        deliver(far, work, made_from("generate", rows))
        work = near.take(TakeWork(["check"], 8), 1.0)
        assert {piece.block.host for piece in work.answer.payload if "tokens" in piece.columns} == {"node-b"}
        assert torch.equal(work.read()["tokens"].values, born([0])["prompt"].values * 2)
        assert control.data.served_by(node.place().address) == node.data.served > 0


def test_rows_that_lie_on_ones_own_node_do_not_travel() -> None:
    with two_nodes() as (_, near, far, node):
        assert Worker(far).once(["generate"]) is LeasedRows
        before = node.data.served
        other = Client(near.address, "beside", DataPlane(node.place(), "beside"))
        assert len(other.take(TakeWork(["check"], 8), 1.0).read()["tokens"].values) == len(
            born([0, 1])["prompt"].values
        )
        assert node.data.served == before
        other.close()


def test_remote_memory_is_freed_even_of_dead_worker() -> None:
    with two_nodes() as (control, _, far, node):
        work = far.take(TakeWork(["generate"], 8), 0.0)
        known, names = far.data.write([b"x"]), Segments(node.run, "looker").names
        control.data.free([known])
        wait_until(lambda: names() == [])
        with pytest.raises(Evicted):
            control.data.read_rows(known, ["x"])
        write_columns(far.data, made_from("generate", work.read()))
        assert len(names()) == 1
        control.fail("far")
        wait_until(lambda: names() == [])


def wait_until(what: Callable[[], bool], limit_s: float = 60.0) -> None:
    deadline = time.monotonic() + limit_s
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_name_from_the_network_cannot_lead_out_of_shared_memory() -> None:
    with queue() as (_, _, node):
        connection = Connection(node.server.address, 5.0)
        with pytest.raises(QueueError, match="no segment's name"):
            connection.ask(ReadRows("../etc/passwd", ["x"]))
        with pytest.raises(QueueError, match="no segment's name"):
            connection.ask(Free(["../tmp/precious"]))
        connection.close()


def test_bad_request_is_answered_and_harmless() -> None:
    with queue() as (_, server, node):
        connection = Connection(server.address, 5.0)
        for request in (Free(["of a node"]), Done("generate", 3), Done("generate", [(0, None)], [(1, 2)]), Renew("x")):  # type: ignore[arg-type,list-item]
            with pytest.raises(QueueError):
                connection.ask(request)
        connection._socket.send_multipart([b"\x93not msgpack of ours"])
        client(server, node, "worker").close()
        connection.close()


def test_missing_queue_is_named_after_time_limit() -> None:
    connection = Connection("tcp://127.0.0.1:9", 0.2)
    with pytest.raises(QueueTimeout, match=r"127\.0\.0\.1:9 .*Hello within 0.2 s"):
        connection.ask(Hello("here"))
    connection.close()


def test_selected_group_continues_and_dropped_group_frees_memory() -> None:
    select = stage("informative", Kind.SELECT, ("length",), (), Scope.GROUP)
    flow = Flow("selecting", [GENERATE, replace(select, type=f"{__name__}:even_groups"), CHECK, NORMALISE, UPDATE])
    with queue(flow, iterations=1, prompts=1) as (control, server, node):
        worker = Worker(client(server, node, "worker", generates=True))
        control.training.schedule.admission.groups_wanted(0)
        admit(control, [1])
        assert worker.once(["generate"]) is LeasedRows
        assert control.training.schedule.admission.groups_wanted(0) == 1
        admit(control, [2])
        assert worker.once(["generate"]) is LeasedRows
        outcome = control.training.records[1].outcome
        assert outcome is not None and outcome.dropped == {"odd": 1}
        assert {uid[1] for uid in control.training.table.parts["generate"]} == {2}
        assert len(Segments(node.run, "looker").names()) == 2, "prompt and tokens of the group that was kept"
        worker.close()


def test_worker_learns_which_rows_of_its_lease_were_dropped() -> None:
    select = stage("informative", Kind.SELECT, ("length",), (), Scope.GROUP)
    flow = Flow("selecting", [GENERATE, replace(select, type=f"{__name__}:even_groups"), CHECK, NORMALISE, UPDATE])
    with queue(flow, iterations=1, prompts=1) as (control, server, node):
        worker = client(server, node, "worker", generates=True)
        control.training.schedule.admission.groups_wanted(0)
        admit(control, [1])
        assert Worker(worker).once(["generate"]) is LeasedRows
        control.training.schedule.admission.sampling.over_sampling = 2.0
        control.training.schedule.admission.groups_wanted(0)
        admit(control, [2, 3])
        work = worker.take(TakeWork(["generate"], 8), 0.0)
        assert [uid[1] for uid in work.read().uids()] == [2, 2, 3, 3]
        rows = work.read([0, 1])
        written = write_columns(worker.data, made_from("generate", rows))
        assert worker.done("generate", [(work.lease, [0, 1])], [(written, [(work.lease, [0, 1])])], keeps=True) == []
        again = worker.take(TakeWork(["generate"], 8), 0.0)
        assert again.kind is Lost and again.answer.dropped == [(work.lease, [2, 3])]
        worker.close()


@registry.selections.register()
def even_groups(length: torch.Tensor, group: torch.Tensor) -> dict[int, str]:
    """Drop groups with odd numbers."""
    return {number: "odd" for number in group.unique().tolist() if number % 2}


def test_later_run_removes_segments_of_killed_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BRAID_SHARED_MEMORY", str(tmp_path))
    dead, alive = (StorageNode("here", "127.0.0.1") for _ in range(2))
    for node in (dead, alive):
        Segments(node.run, "worker").write([b"of a worker"])
    os.close(dead._handle)
    assert remove_abandoned() == [dead.run]
    assert {path.name for path in tmp_path.iterdir()} == {alive.path.name, f"braid-{alive.run}-worker-0"}
    dead.server.close()
    alive.close()
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(scope="module")
def context() -> multiprocessing.context.BaseContext:
    result = multiprocessing.get_context("forkserver")
    result.set_forkserver_preload([serve.__module__])
    return result


@settings(max_examples=6)
@given(st.data())
def test_rows_train_once_despite_dead_or_late_workers(
    context: multiprocessing.context.BaseContext, data: st.DataObject
) -> None:
    """A queue in a process of its own, several workers, and a fate for each piece of work."""
    iterations, prompts = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
    workers, seed = data.draw(st.integers(1, 3)), data.draw(st.integers(0, 1000))
    ours, theirs = context.Pipe()
    arguments = {"iterations": iterations, "prompts": prompts, "lease_s": 0.15}
    process = context.Process(target=serve, args=(theirs, arguments))
    process.start()
    address, place = unpack_message(ours.recv_bytes(), tuple[str, Place])
    trained = play(address, place, iterations, prompts, workers, random.Random(seed))
    ours.send_bytes(b"end")
    process.join(60)
    assert process.exitcode == 0
    assert trained == Counter({(0, g, s): 1 for g in range(iterations * prompts) for s in range(2)})
    assert Segments(place.run, "looker").names() == []


def play(
    address: str, where: Place, iterations: int, prompts: int, workers: int, chance: random.Random
) -> Counter[tuple[int, int, int]]:
    """Workers in turn: most do their work, some forget it, some are late. Returns how often each row was trained."""

    def join(number: int) -> Client:
        return Client(address, f"w{number}", DataPlane(where, f"w{number}", 10.0), generates=True)

    LOADED.clear()
    engines, joined, admitted, trainer = [join(n) for n in range(workers)], workers, 0, Worker(join(1000))
    deadline = time.monotonic() + 60
    while len(trainer.trained) < iterations * prompts * SAMPLES:
        assert time.monotonic() < deadline
        if admitted * prompts * SAMPLES <= len(trainer.trained):
            groups = range(admitted * prompts, (admitted + 1) * prompts)
            admit_over_the_wire(engines[0], born(groups))
            admitted += 1
        trainer.once(["train.actor"], 0.02)
        place, fate = chance.randrange(len(engines)), chance.random()
        worker = engines[place]
        work = worker.take(TakeWork(["check", "generate"], 3), 0.02)
        if work.kind is LoadWeights:
            LOADED[worker.holder] = work.answer.version
            worker.ask(Loaded(work.answer.version))
        elif work.kind is LeasedRows and fate < 0.2:
            engines[place] = join(joined)  # The old one forgets what it holds; its lease runs out.
            joined += 1
            worker.close()
        elif work.kind is LeasedRows:
            rows = work.read()
            if fate < 0.3:
                time.sleep(0.3)  # Too late: the lease has run out.
            deliver(worker, work, made_from(work.consumer, rows, LOADED.get(worker.holder, 0)))
    for worker in [*engines, trainer.client]:
        worker.close()
    return Counter(trainer.trained)


def test_consumer_reads_requested_version_of_column() -> None:
    shaped = replace(stage("shape", Kind.INFER, ("reward",), ("reward",)), role="other")
    flow = Flow("versions", [GENERATE, CHECK, shaped, NORMALISE, UPDATE])
    with queue(flow, iterations=1) as (control, server, node):
        worker = client(server, node, "worker", generates=True)
        control.training.schedule.admission.groups_wanted(0)
        admit(control, [0, 1])
        assert Worker(worker).once(["generate"]) is LeasedRows and Worker(worker).once(["check"]) is LeasedRows
        work = worker.take(TakeWork(["shape"], 8), 0.0)
        before = work.read()["reward"]
        deliver(worker, work, {"reward": before + 100})
        assert torch.equal(worker.take(TakeWork(["train.actor"], 8), 0.0).read()["reward"], before + 100)
        worker.close()


def test_weight_copy_is_asked_of_another_worker_when_the_first_dies(tmp_path: Path) -> None:
    follow = Stage("follow", "update", "reference", {"source": "actor"}, kind=Kind.TRAIN)
    with queue(Flow("following", [GENERATE, CHECK, NORMALISE, UPDATE, follow]), iterations=1) as (
        control,
        server,
        node,
    ):
        first, second = client(server, node, "first", generates=True), client(server, node, "second")
        follower, trainer = client(server, node, "follower"), Worker(first)
        control.steps.allow(1)
        control.training.schedule.admission.groups_wanted(0)
        admit(control, [0, 1])
        assert [trainer.once() for _ in range(4)] == [LeasedRows] * 3 + [Step]
        assert follower.take(TakeWork([], 8, role="reference"), 0.0).kind is Waited
        assert first.take(TakeWork([], 8, role="actor"), 0.0).answer == Give(lost=[], dropped=[], stage="follow")
        assert second.take(TakeWork([], 8, role="actor"), 0.0).kind is Waited, "one of them is enough"
        control.fail("first")
        assert second.take(TakeWork([], 8, role="actor"), 0.0).kind is Give
        file = tmp_path / "weights"
        file.write_bytes(b"weights")
        location = WeightLocation(1, 7, str(file))
        second.ask(WeightsGiven("follow", location))
        step = follower.take(TakeWork([], 8, role="reference"), 0.0)
        assert step.kind is Step and step.answer.weights == location
        follower.ask(Stepped("follow", {}))
        assert not file.exists(), "weights that were taken over are still kept"
        assert control.finished[0].iteration == 1
        for worker in (first, second, follower):
            worker.close()
