"""HTTP servers as engines: the engine contract on a real vLLM server and on SGLang's protocol, weights, and
refusals.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import closing, suppress
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from aiohttp import web
from transformers import PreTrainedModel

from braidrl.data.rows import FinishReason
from braidrl.engines.embedded.embedded_engine import Decoding, EmbeddedEngine
from braidrl.engines.engine import EngineError
from braidrl.engines.engine_contract import (
    CHECKS,
    EngineUnderTest,
    all_of,
    requests,
    weights_that_lack_a_tensor_are_refused,
)
from braidrl.engines.http.dialects import RECEIVES, SGLANG, VLLM, Dialect, ServerNeeds
from braidrl.engines.http.http_engine import HttpEngine, ServerSpec
from braidrl.engines.requests import EngineRow, Request, Response, SamplingParams
from braidrl.engines.stepping import EngineReplica
from braidrl.errors import UserError
from braidrl.observe.metrics import read_metrics
from braidrl.weights.file import stored_weights
from braidrl.weights.publisher import ModelWeights
from tests.engines.http import servers
from tests.engines.http.servers import STOCK, SglangSpeaker, VllmServer, in_a_thread
from tests.engines.served import (
    LIMIT,
    LONG,
    LONG_OF_SLOW,
    largest_gap,
    other_weights,
    served_model,
    write_served_model,
)
from tests.engines.test_factory import gaps_of
from tests.engines.tiny import END, make_tokenizer, training_log_probs
from tests.tiny import Workshop, free_port, recorded

# On a busy machine vLLM's server takes minutes to start.
pytestmark = pytest.mark.timeout(600)
MODEL = served_model()
TOKENIZER = make_tokenizer()
SHAPES = {name: tensor.shape for name, tensor in MODEL.state_dict().items()}
SPEC = ServerSpec(VLLM, TOKENIZER, (END,), SHAPES, 16, ServerNeeds(LIMIT), limit_s=120.0)
# A reward that a random model gets half of the time.
EVEN = """
def even(response: str) -> bool:
    return sum(response.encode()) % 2 == 0
"""


def speaker_of(model: PreTrainedModel) -> SglangSpeaker:
    return SglangSpeaker(EngineReplica(EmbeddedEngine(deepcopy(model), TOKENIZER, Decoding(16, LIMIT))))


class Asked:
    """An engine in front of a server, and its event loop."""

    def __init__(self, dialect: Dialect, url: str | None = None, sending: bool = False) -> None:
        self.runner = asyncio.Runner()
        self.speaker: SglangSpeaker | None = None
        if url is None:
            self.speaker = speaker_of(MODEL)
            url = self.runner.run(self.speaker.start())
        spec = replace(SPEC, dialect=dialect)
        if sending:
            spec = replace(spec, needs=replace(SPEC.needs, receives=True))
        self.engine = HttpEngine(url, spec)
        self.runner.run(self.engine.start())

    def close(self) -> None:
        self.runner.run(self.engine.close())
        if self.speaker is not None:
            self.runner.run(self.speaker.close())
        self.runner.close()


@pytest.fixture(scope="module")
def vllm_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    server = VllmServer(write_served_model(tmp_path_factory.mktemp("served") / "model"))
    yield server
    server.close()


@pytest.fixture(scope="module", params=["sglang", pytest.param("vllm", marks=pytest.mark.soak)])
def asked(request: pytest.FixtureRequest) -> Iterator[Asked]:
    made = Asked(VLLM, request.getfixturevalue("vllm_server").url) if request.param == "vllm" else Asked(SGLANG)
    yield made
    made.close()


def in_training(wanted: Sequence[Request], finished: Sequence[Response]) -> list[torch.Tensor]:
    return training_log_probs(MODEL, list(wanted), list(finished))


def subject(asked: Asked) -> EngineUnderTest:
    long = LONG if asked.speaker else LONG_OF_SLOW
    return EngineUnderTest(lambda: asked.engine, END, LIMIT, in_training, other_weights, long=long)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_servers_keep_the_contract(asked: Asked, check: Callable[[EngineUnderTest], Awaitable[None]]) -> None:
    asked.runner.run(asked.engine.update_weights(0, ModelWeights(MODEL)))
    asked.runner.run(check(subject(asked)))  # type: ignore[arg-type]


def test_log_probs_after_each_update_are_those_of_the_trainer(asked: Asked) -> None:
    assert asked.runner.run(largest_gap(asked.engine, requests(subject(asked), 4))) < 1e-5


def test_a_stop_text_ends_a_row_with_the_token_that_completes_it(asked: Asked) -> None:
    asked.runner.run(asked.engine.update_weights(0, ModelWeights(MODEL)))
    (request, *_) = requests(subject(asked), 1)
    free = asked.runner.run(asked.engine.submit(request)).tokens
    text = TOKENIZER.decode(free[3:5])
    stopping = replace(request, sampling=replace(request.sampling, stop=(text,)))
    stopped = asked.runner.run(asked.engine.submit(stopping))
    first = next(count for count in range(1, 13) if text in TOKENIZER.decode(free[:count]))
    assert stopped.tokens.tolist() == free[:first].tolist() and stopped.finish_reason is FinishReason.STOP


def test_a_server_has_the_trainers_weights_after_each_network_update(
    vllm_server: VllmServer,
) -> None:
    with closing(Asked(VLLM, vllm_server.url, sending=True)) as asked:
        assert asked.runner.run(largest_gap(asked.engine, requests(subject(asked), 4))) < 1e-5
        asked.runner.run(asked.engine.update_weights(0, ModelWeights(MODEL)))
        asked.runner.run(weights_that_lack_a_tensor_are_refused(subject(asked)))


def test_a_server_that_refuses_weights_fails_before_the_trainer_waits(vllm_server: VllmServer) -> None:
    deaf = replace(VLLM, receive=lambda notice, label: [("/no_such_place", notice)])
    with closing(Asked(deaf, vllm_server.url, sending=True)) as asked:
        start = time.monotonic()
        with pytest.raises(EngineError, match=r"weights of http://\S+ .*/no_such_place answers 404"):
            asked.runner.run(asked.engine.update_weights(1, ModelWeights(MODEL)))
        assert time.monotonic() - start < 60


@pytest.mark.soak
@pytest.mark.parametrize("weights", ["folder", "network"])
def test_a_run_with_a_server_trains_like_a_run_without(
    workshop: Workshop, vllm_server: VllmServer, weights: str
) -> None:
    before = Asked(VLLM, vllm_server.url)
    before.runner.run(before.engine.update_weights(7, other_weights()))
    before.close()
    (workshop.folder / "parity.py").write_text(EVEN)
    settings = {
        "model": str(vllm_server.model),
        "trainer": {"steps": 2, "learning_rate": 3e-3},
        "reward": {"verify": f"{workshop.folder}/parity.py:even"},
        "algorithm": {"old": "recompute"},
    }
    room = {"max_sequence_tokens": 100}
    servers = {"urls": vllm_server.url, "weights": weights}
    run = workshop.run("http", **settings, rollout={"engine": "http", "reproducible": True, "servers": servers, **room})
    lines = read_metrics(run)
    assert [line["step"] for line in lines] == [1, 2]
    assert all(line["actor/grad_norm"] > 0 for line in lines)
    assert max(gaps_of(run, 2)) < 1e-5
    assert recorded(run, 2)["version"].unique().tolist() == [1]
    alone = workshop.run("alone", **settings, rollout=room)
    assert recorded(run, 1)["tokens"].tolist() == recorded(alone, 1)["tokens"].tolist(), (
        "sampling depends on the row, not on the engine"
    )


def test_vllms_server_draws_the_tokens_of_the_embedded_engine(vllm_server: VllmServer) -> None:
    asked = Asked(VLLM, vllm_server.url)
    asked.runner.run(asked.engine.update_weights(0, ModelWeights(MODEL)))
    submitted = requests(subject(asked), 20)
    finished = asked.runner.run(all_of(asked.engine, submitted))
    alone = EmbeddedEngine(MODEL, TOKENIZER, Decoding(16, LIMIT)).generate(submitted)
    asked.close()
    assert [row.tokens.tolist() for row in finished] == [row.tokens.tolist() for row in alone]


def test_a_restarted_server_serves_no_row_before_it_has_current_weights() -> None:
    asked = Asked(SGLANG)
    assert asked.speaker is not None
    engine, (request, *_) = asked.engine, requests(subject(asked), 1)
    asked.runner.run(engine.update_weights(2, other_weights()))
    asked.speaker.weights = "default"
    with pytest.raises(EngineError, match=r"was restarted, .*has 'default'"):
        asked.runner.run(engine.submit(request))
    assert asked.runner.run(engine.recover()) == -1
    asked.runner.run(engine.update_weights(2, other_weights()))
    assert set(asked.runner.run(engine.submit(request)).versions.tolist()) == {2}
    asked.close()


def test_a_run_whose_server_takes_no_weights_ends_before_it_trains(workshop: Workshop) -> None:
    speaker = speaker_of(MODEL)
    write_served_model(workshop.folder / "model")
    settings = {"model": str(workshop.folder / "model"), "rollout": {"engine": "http", "max_sequence_tokens": 100}}
    with in_a_thread(speaker) as url:
        settings["rollout"] |= {"servers": {"urls": url, "dialect": "sglang"}}
        speaker.refuses_weights = True
        with pytest.raises(
            UserError, match=r"rollout.servers: http://\S+/update_weights_from_disk answers 500: .*no room"
        ):
            workshop.run("refused", **settings)
        speaker.refuses_weights = False
        run = workshop.run("taken", **settings)
    assert [line["step"] for line in read_metrics(run)] == [1, 2]
    assert recorded(run, 2)["version"].unique().tolist() == [1] and speaker.weights != "default"


@pytest.mark.parametrize(
    ("dialect", "settings", "told"),
    [
        (SGLANG, {}, "start it with --enable-deterministic-inference"),
        (
            SGLANG,
            {"enable_deterministic_inference": True, "context_length": 9},
            f"start it with --context-length {LIMIT}",
        ),
        (VLLM, {}, r"weights: start .*VLLM_SERVER_DEV_MODE=1"),
    ],
)
def test_an_unsuitable_server_is_refused_with_the_option_it_lacks(
    dialect: Dialect, settings: dict[str, Any], told: str
) -> None:
    async def connect() -> None:
        speaker = speaker_of(MODEL)
        speaker.settings = settings
        engine = HttpEngine(await speaker.start(), replace(SPEC, dialect=dialect))
        try:
            await engine.start()
        finally:
            await engine.close()
            await speaker.close()

    with pytest.raises(UserError, match=told):
        asyncio.run(connect())


def test_a_server_that_does_not_answer_is_a_user_error() -> None:
    async def connect() -> None:
        engine = HttpEngine("http://127.0.0.1:9", SPEC)
        try:
            await engine.start()
        finally:
            await engine.close()

    with pytest.raises(UserError, match=r"http://127.0.0.1:9 .*; start it, .*rollout.servers"):
        asyncio.run(connect())


@pytest.mark.parametrize(
    ("said", "message"),
    [
        (
            "<html>welcome</html>",
            r"/server_info\?config_format=json .*JSON object: <html>.*; start",
        ),
        ("[]", r"JSON object: \[\]; start .*rollout.servers"),
        (
            '{"model_path": "of another dialect"}',
            r"another project's server \('vllm_config'\); correct rollout.servers",
        ),
    ],
)
def test_an_address_of_another_program_is_a_user_error(said: str, message: str) -> None:
    async def answer(_: web.Request) -> web.Response:
        return web.Response(text=said)

    async def connect() -> None:
        app = web.Application()
        app.router.add_get("/server_info", answer)
        runner, port = web.AppRunner(app), free_port()
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        engine = HttpEngine(f"http://127.0.0.1:{port}", SPEC)
        try:
            await engine.start()
        finally:
            await engine.close()
            await runner.cleanup()

    with pytest.raises(UserError, match=message):
        asyncio.run(connect())


@pytest.mark.parametrize(
    "said", [{"error": "busy"}, {"meta_info": None}, {"meta_info": {"output_token_logprobs": [[]]}}]
)
def test_an_answer_without_tokens_is_a_user_error(said: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    async def answer(self: SglangSpeaker, asked: web.Request) -> web.Response:
        return web.json_response(said)

    monkeypatch.setattr(SglangSpeaker, "_generate", answer)
    asked = Asked(SGLANG)
    with pytest.raises(UserError, match="gives an answer without tokens"):
        asked.runner.run(asked.engine.submit(Request((0, 0, 0), torch.tensor([1]), SamplingParams(max_tokens=4))))
    asked.close()


def drawn(*tokens: Any, log_prob: Any = -1.0) -> str:
    return json.dumps({"meta_info": {"output_token_logprobs": [[log_prob, token, None] for token in tokens]}})


RAW = b"HTTP/1.1 200 OK\r\n"
HOSTILE = {
    "a token beyond 64 bits": (drawn(2**70), "token"),
    "a token beyond the vocabulary": (drawn(10**6), "token"),
    "a negative token": (drawn(-1), "token"),
    "a token that is a text": (drawn("1"), "token"),
    "a token that is true": (drawn(True), "token"),
    "a log-prob that is none": (drawn(1, log_prob=None), "log-prob"),
    "a log-prob that is NaN": (drawn(1, log_prob=float("nan")), "log-prob"),
    "a log-prob above 0": (drawn(1, log_prob=3.0), "log-prob"),
    "lists in lists": ("[" * 100_000, "no JSON object"),
    "700 MB": (None, "bytes"),
    "another address": (307, "rollout.servers"),
    "an address that escapes": (308, "rollout.servers"),
    "a page": ("<html><title>Sign in</title>\x1b[2J</html>", "no JSON object"),
    "a small answer that becomes large": (gzip.compress(b" " * (64 << 20)), "bytes"),
    "a coding that ends early": (b"{", "without tokens"),
    "a header that is none": (RAW + b"X: \x1b[2J\x00\r\n\r\n{}", "does not answer"),
    "fewer bytes than it names": (RAW + b"Content-Length: 100\r\n\r\n{", "does not answer"),
    "a chunk of no size": (RAW + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n", "does not answer"),
    "headers without end": (RAW + b"X: 1\r\n" * 100_000, "does not answer"),
}
"""Answers of a server, and what the line about each names."""


@pytest.mark.parametrize("kind", HOSTILE)
def test_an_answer_that_was_not_asked_for_ends_in_a_line(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    said, named = HOSTILE[kind]
    reached = list[str]()

    async def answer(self: SglangSpeaker, asked: web.Request) -> web.StreamResponse:
        reached.append(asked.path)
        if said == 308:
            return web.Response(status=said, headers={"Location": "http://a/%1b[2J"})
        if said == 307:
            raise web.HTTPTemporaryRedirect("/generate?again")
        if isinstance(said, str):
            return web.Response(text=said)
        if isinstance(said, bytes):
            if not said.startswith(RAW):
                return web.Response(body=said, headers={"Content-Encoding": "gzip"})
            assert asked.transport is not None
            asked.transport.write(said)
            asked.transport.close()
        large = web.StreamResponse()
        await large.prepare(asked)
        with suppress(ConnectionError):
            for _ in range(700):
                await large.write(b"1" * (1 << 20))
        return large

    monkeypatch.setattr(SglangSpeaker, "_generate", answer)
    with closing(Asked(SGLANG)) as asked:
        request = Request((0, 0, 0), torch.tensor([1]), SamplingParams(max_tokens=4))
        with pytest.raises((UserError, EngineError), match=named) as caught:
            asked.runner.run(asked.engine.submit(request))
    assert str(caught.value).isprintable() and len(reached) == 1


@pytest.mark.parametrize(
    ("tokens", "status", "message"),
    [((), 200, "before its end"), ((3,), 200, "before its end"), ((3, 4), 200, "before its end"), ((), 500, "500: ")],
)
def test_a_row_that_ends_early_or_fails_at_the_server_is_asked_for_three_times(
    tokens: tuple[int, ...], status: int, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def answer(self: SglangSpeaker, asked: web.Request) -> web.Response:
        return web.Response(text=drawn(*tokens), status=status)

    monkeypatch.setattr(SglangSpeaker, "_generate", answer)
    with closing(Asked(SGLANG)) as asked:
        request, kinds = Request((0, 0, 0), torch.tensor([1]), SamplingParams(max_tokens=4)), list[type]()
        while UserError not in kinds and len(kinds) < 9:
            with pytest.raises((UserError, EngineError), match=message) as caught:
                asked.runner.run(asked.engine.submit(request))
            kinds.append(caught.type)
    assert kinds == [EngineError, EngineError, UserError]


def test_a_row_is_asked_for_until_a_server_that_starts_is_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    async def answer(self: SglangSpeaker, asked: web.Request) -> web.Response:
        return web.Response(text="starting", status=503)

    monkeypatch.setattr(SglangSpeaker, "_generate", answer)
    with closing(Asked(SGLANG)) as asked:
        request = Request((0, 0, 0), torch.tensor([1]), SamplingParams(max_tokens=4))
        for _ in range(5):
            with pytest.raises(EngineError, match="503: starting"):
                asked.runner.run(asked.engine.submit(request))


def vllm_settings(processors: list[str], mode: str, room: int, ahead: bool) -> dict[str, Any]:
    model = {"logits_processors": processors, "logprobs_mode": mode, "max_model_len": room}
    return {"vllm_config": {"model_config": model, "scheduler_config": {"async_scheduling": ahead}}}


def test_a_vllm_server_without_the_worker_extension_is_refused_with_its_option() -> None:
    settings = vllm_settings(["a:DrawByRow"], "processed_logits", 9, False)
    for extension, missing in (("", f"--worker-extension-cls {RECEIVES}"), (RECEIVES, None)):
        settings["vllm_config"]["parallel_config"] = {"worker_extension_cls": extension}
        assert VLLM.missing(settings, ServerNeeds(9, receives=True)) == missing
        assert VLLM.missing(settings, ServerNeeds(9)) is None


@pytest.mark.parametrize(
    ("settings", "missing"),
    [
        (vllm_settings(["a:DrawByRow"], "processed_logits", 9, False), None),
        (
            vllm_settings([], "processed_logits", 9, False),
            "--logits-processors braidrl.engines.vllm.logits_processor:DrawByRow",
        ),
        (vllm_settings(["a:DrawByRow"], "raw_logprobs", 9, False), "--logprobs-mode processed_logits"),
        (vllm_settings(["a:DrawByRow"], "processed_logits", 9, True), "--no-async-scheduling"),
        (vllm_settings(["a:DrawByRow"], "processed_logits", 8, False), "--max-model-len 9"),
    ],
)
def test_a_vllm_server_without_a_needed_argument_is_refused_by_name(
    settings: dict[str, Any], missing: str | None
) -> None:
    assert VLLM.missing(settings, ServerNeeds(9)) == missing


@pytest.mark.parametrize(
    ("settings", "sampling", "missing"),
    [
        (vllm_settings([], "raw_logprobs", 9, True), SamplingParams(), None),
        (vllm_settings([], "processed_logprobs", 9, True), SamplingParams(0.7), None),
        (vllm_settings([], "raw_logprobs", 9, True), SamplingParams(top_p=0.9), None),
        (vllm_settings([], "raw_logprobs", 9, True), SamplingParams(0.7), "--logprobs-mode processed_logprobs"),
        (vllm_settings([], "processed_logprobs", 9, True), SamplingParams(top_k=5), "--logprobs-mode raw_logprobs"),
        (
            vllm_settings(["a:DrawByRow"], "processed_logits", 9, False),
            SamplingParams(),
            "no --logits-processors, or write rollout.reproducible=true",
        ),
    ],
)
def test_a_stock_vllm_server_needs_log_probs_of_the_sampling_alone(
    settings: dict[str, Any], sampling: SamplingParams, missing: str | None
) -> None:
    assert VLLM.missing(settings, ServerNeeds(9, reproducible=False, sampling=sampling)) == missing


@pytest.mark.parametrize("dialect", [VLLM, SGLANG], ids=["vllm", "sglang"])
def test_a_server_has_the_shape_that_the_run_gives_an_engine(dialect: Dialect) -> None:
    settings = vllm_settings([], "raw_logprobs", 9, True) | {"tp_size": 2, "pp_size": 1, "context_length": 9}
    settings["vllm_config"]["parallel_config"] = {"tensor_parallel_size": 2, "pipeline_parallel_size": 1}
    told = [
        dialect.missing(settings, ServerNeeds(9, False, tensor=tensor, pipeline=pipeline))
        for tensor, pipeline in ((1, 1), (2, 1), (4, 1), (2, 2))
    ]
    assert told[:2] == [None, None]
    assert told[2:] == (
        ["--tensor-parallel-size 4", "--pipeline-parallel-size 2"]
        if dialect is VLLM
        else ["--tp-size 4", "--pp-size 2"]
    )


def test_a_stock_vllm_server_is_asked_to_draw_as_the_run_samples() -> None:
    request = Request((0, 1, 2), torch.tensor([5, 6]), SamplingParams(0.7, 0.9, 20, 8))
    row = EngineRow(request, 8, (END,), name="row")
    _, body = VLLM.generate(row, 3, "first", False)
    assert (body["temperature"], body["top_p"], body["top_k"]) == (0.7, 0.9, 20)
    assert "vllm_xargs" not in body and "seed" not in body
    greedy = replace(request, sampling=replace(request.sampling, greedy=True))
    assert VLLM.generate(replace(row, request=greedy), 3, "first", False)[1]["temperature"] == 0.0
    _, body = VLLM.generate(row, 3, "first", True)
    assert (body["temperature"], body["top_p"], body["top_k"]) == (1.0, 1.0, 0) and "braid" in body["vllm_xargs"]


@pytest.mark.soak
def test_a_stock_vllm_server_has_the_trainers_log_probs_after_each_update(tmp_path: Path) -> None:
    server = VllmServer(write_served_model(tmp_path / "model"), arguments=STOCK)
    engine = HttpEngine(server.url, replace(SPEC, needs=ServerNeeds(LIMIT, reproducible=False)))
    submitted = requests(EngineUnderTest(lambda: engine, END, LIMIT, in_training, other_weights), 4)
    with closing(server), asyncio.Runner() as runner:
        runner.run(engine.start())
        assert runner.run(largest_gap(engine, submitted, updates=20)) < 1e-5
        runner.run(engine.close())


def test_weights_in_a_folder_hold_every_name_and_are_gone_when_closed(tmp_path: Path) -> None:
    stored = stored_weights(ModelWeights(MODEL).tensors(), repeat=True, within=tmp_path)
    given = dict(stored.tensors())
    assert given.keys() == stored.shapes().keys() == MODEL.state_dict().keys()
    assert all(torch.equal(given[name], tensor) for name, tensor in MODEL.state_dict().items())
    stored.close()
    assert not list(tmp_path.iterdir())


def test_a_server_that_has_died_is_closed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(servers, "FORKED", "raise SystemExit(3)")
    with pytest.raises(RuntimeError, match=r"did not start; .*status is 3"):
        VllmServer(tmp_path)
