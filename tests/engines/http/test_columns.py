"""Columns per token over HTTP: the routes of a mixture and a user's column from a real vLLM server, through partial
rollouts into updates; and the refusal of columns that a server does not return.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from braidrl.data.token_columns import ROUTED_EXPERTS, TokenColumn, from_text, to_text, token_columns
from braidrl.engines.engine_contract import all_of
from braidrl.engines.http.dialects import RECEIVES, VLLM, ServerNeeds
from braidrl.engines.http.http_engine import HttpEngine, ServerSpec
from braidrl.engines.requests import Request, SamplingParams
from braidrl.errors import UserError
from braidrl.observe.metrics import read_metrics
from braidrl.training.decoders.routing import use_routing
from braidrl.training.loading import load_decoder
from braidrl.training.pretrained import load_tokenizer
from braidrl.weights.model_files import HubNames, model_in, shapes_in_folder
from braidrl.weights.publisher import ModelWeights
from tests.engines.http.servers import VllmServer
from tests.engines.served import LIMIT
from tests.engines.vllm.test_route_recorder import differing, in_training
from tests.invariants.traces import EVERY_STEP, merged
from tests.tiny import ROOT, Workshop, recorded, sums, write_jsonl
from tests.training.decoders.families import write_family
from tests.training.decoders.test_families import ON_VLLM

PLUGIN = f"{ROOT}/examples/plugins/token_column.py:top_two"
REPLAYED = f"""
from braidrl.flow import Flow, actor, advantage, reward


def flow() -> Flow:
    generate = actor.generate(columns=["{PLUGIN}"])
    update = actor.update(loss={{"name": "clip"}}, aggregate="token-mean", old="recompute", replay="inference")
    return Flow("replayed", [generate, reward.verify(), advantage.group_normalized(), update])
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_family(tmp_path_factory.mktemp("mixture") / "model", "qwen3_moe", **ON_VLLM["qwen3_moe"])


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[VllmServer]:
    with closing(VllmServer(folder)) as server:
        yield server


class Asked:
    """An engine in front of a server, and its event loop."""

    def __init__(self, server: VllmServer, columns: tuple[str, ...]) -> None:
        self.runner, tokenizer = asyncio.Runner(), load_tokenizer(server.model)
        names = HubNames(model_in(server.model))
        needs = ServerNeeds(LIMIT, columns=columns)
        shapes = shapes_in_folder(server.model)
        spec = ServerSpec(VLLM, tokenizer, (), shapes, 16, needs, limit_s=120.0, hub_names=names)
        self.engine = HttpEngine(server.url, spec)

    def __enter__(self) -> Asked:
        self.runner.run(self.engine.start())
        return self

    def __exit__(self, *_: object) -> None:
        self.runner.run(self.engine.close())
        self.runner.close()


def submitted(columns: tuple[str, ...], most: int = 40) -> list[Request]:
    prompts = torch.randint(0, 16, (4, 40), generator=torch.Generator().manual_seed(3))
    sampling = SamplingParams(max_tokens=most, ends=False)
    return [
        Request((0, group, sample), prompt, sampling, columns=columns)
        for group, prompt in enumerate(prompts)
        for sample in range(2)
    ]


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_a_server_returns_routes_and_a_users_column_after_each_update(server: VllmServer) -> None:
    trained = load_decoder(str(server.model), torch.float32, "cpu").requires_grad_(False).eval()
    use_routing(trained)
    columns = (ROUTED_EXPERTS, PLUGIN)
    with Asked(server, columns) as asked:
        for version in range(1, 3):
            asked.runner.run(asked.engine.update_weights(version, ModelWeights(trained)))
            requests = submitted(columns)
            for request, response in zip(requests, asked.runner.run(all_of(asked.engine, requests)), strict=True):
                routes = response.per_token[ROUTED_EXPERTS]
                expected, log_probs = in_training(trained, request, response, is_given=False)
                assert routes.dtype == torch.uint8 and routes.shape == expected.shape
                assert differing(routes, expected) < 0.01
                torch.testing.assert_close(response.log_probs, log_probs, rtol=0, atol=1e-4)
                assert response.per_token["top_two"].shape == (len(response.tokens), 2)
                assert (response.per_token["top_two"][:, 0] >= response.log_probs - 1e-5).all()
            for name, parameter in trained.named_parameters():
                if "gate.weight" in name:
                    parameter.add_(0.05 * torch.randn(parameter.shape))


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_an_aborted_row_has_the_values_of_the_tokens_it_drew(server: VllmServer) -> None:
    columns = (ROUTED_EXPERTS, PLUGIN)
    request = submitted(columns, 500)[0]

    async def aborted(engine: HttpEngine) -> None:
        row = asyncio.ensure_future(engine.submit(request))
        await asyncio.sleep(1.0)
        await engine.abort(request.uid)
        response = await row
        drawn = len(response.tokens)
        assert 0 < drawn < 500 and len(response.per_token["top_two"]) == drawn
        assert len(response.per_token[ROUTED_EXPERTS]) == len(request.prompt) + drawn - 1

    with Asked(server, columns) as asked:
        asked.runner.run(asked.engine.update_weights(1, ModelWeights(load_decoder(str(server.model), torch.float32))))
        asked.runner.run(aborted(asked.engine))


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_a_column_whose_function_the_server_lacks_is_refused_before_the_first_row(server: VllmServer) -> None:
    missing = f"{server.model}/missing.py:column"
    with pytest.raises(UserError, match=r"cannot return .*missing\.py:column"), Asked(server, (missing,)):
        pass
    with Asked(server, ()) as asked:
        request = replace(submitted(())[0], sampling=SamplingParams(max_tokens=2, ends=False))
        assert len(asked.runner.run(asked.engine.submit(request)).tokens) == 2, "the server continues"


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_suspended_rows_of_a_server_replay_the_routes_that_drew_them(server: VllmServer, tmp_path: Path) -> None:
    shop = Workshop(tmp_path, server.model, write_jsonl(tmp_path / "train.jsonl", sums(64)))
    (tmp_path / "flow.py").write_text(REPLAYED)
    partial = {"tokens_per_iteration": 7, "max_response_tokens": 20, "temperature": 0.8, "max_sequence_tokens": 100}
    trainer = {"steps": 3, "max_staleness": 2, "surplus": "keep", "learning_rate": 1e-4}
    sections = merged(EVERY_STEP, {"flow": f"{tmp_path}/flow.py:flow", "trainer": trainer, "rollout": partial})
    servers = {"engine": "http", "reproducible": True, "servers": server.url}
    served, alone = shop.run("http", **merged(sections, {"rollout": servers})), shop.run("alone", **sections)
    for step in range(1, 4):
        ours, theirs = (recorded(run, step).ordered() for run in (served, alone))
        assert ours["tokens"].values.tolist() == theirs["tokens"].values.tolist()
        assert differing(ours[ROUTED_EXPERTS].values, theirs[ROUTED_EXPERTS].values.long()) < 0.01
        torch.testing.assert_close(ours["top_two"].values, theirs["top_two"].values, rtol=0, atol=1e-4)
    versions = [set(row.tolist()) for row in recorded(served, 3)["rollout_versions"]]
    assert max(map(len, versions)) > 1, "some rows were suspended"
    for ours, theirs in zip(read_metrics(served), read_metrics(alone), strict=True):
        for key in ("train/rollout_log_prob_gap", "actor/grad_norm"):
            assert ours[key] == pytest.approx(theirs[key], rel=1e-2, abs=1e-4)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.bfloat16, torch.int16])
def test_values_of_a_column_pass_through_json_unchanged(dtype: torch.dtype) -> None:
    values = torch.arange(12).reshape(2, 3, 2).to(dtype)
    column = TokenColumn("column", str(dtype).removeprefix("torch."), (3, 2))
    assert from_text(to_text(values), column).equal(values)
    with pytest.raises(ValueError, match=r"column has entries of the shape \(3, 2\), not \(3,\)"):
        from_text(to_text(values), replace(column, shape=(3,)))


def test_a_server_without_what_a_column_needs_is_refused_with_its_option() -> None:
    model = {"logits_processors": ["a:DrawByRow"], "logprobs_mode": "processed_logits", "max_model_len": 9}
    settings = {"vllm_config": {"model_config": model, "scheduler_config": {"async_scheduling": False}}}
    needs = ServerNeeds(9, columns=(ROUTED_EXPERTS,))
    assert VLLM.missing(settings, needs) == f"--worker-extension-cls {RECEIVES}"
    settings["vllm_config"]["parallel_config"] = {"worker_extension_cls": RECEIVES}
    assert VLLM.missing(settings, needs) == "--enforce-eager"
    assert VLLM.missing(settings, replace(needs, columns=(PLUGIN,))) is None


def test_columns_that_a_server_does_not_return_are_refused_before_the_run(workshop: Workshop) -> None:
    flow = f"{PLUGIN.partition(':')[0]}:flow"
    rollout = {"engine": "http", "reproducible": True, "servers": {"urls": "http://127.0.0.1:9", "dialect": "sglang"}}
    with pytest.raises(UserError, match=r"column top_two: servers of .*dialect=sglang do not return top_two"):
        workshop.run("refused", flow=flow, rollout=rollout)
    with pytest.raises(UserError, match=r"top_two where Braid draws; write rollout.reproducible=true"):
        workshop.run("stock", flow=flow, rollout={"engine": "http", "servers": "http://127.0.0.1:9"})
    assert "top_two" in token_columns
