"""The invariants with images: every runtime one result; replay and resume; images in later turns."""

from __future__ import annotations

import asyncio
import base64
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from transformers import AutoModelForImageTextToText

from braidrl.agents.endpoint import Endpoint
from braidrl.agents.trajectory import Trajectory, TurnSampling
from braidrl.agents.turns import TurnTemplate
from braidrl.config import ImagesConfig, parse_config
from braidrl.data.templates import PromptTemplate
from braidrl.engines.embedded.embedded_engine import Decoding, EmbeddedEngine
from braidrl.engines.requests import SamplingParams
from braidrl.engines.stepping import EngineReplica
from braidrl.errors import UserError
from braidrl.observe.metrics import Sums, read_metrics
from braidrl.runtimes.prepare.setup import prepare
from braidrl.runtimes.row_store import Admission
from braidrl.runtimes.run import TrainingRun
from braidrl.runtimes.saving.folders import latest_checkpoint
from braidrl.training.decoders.images import images_of
from braidrl.training.loading import load_decoder
from braidrl.training.pretrained import load_tokenizer
from braidrl.training.processors import load_vision
from tests.agents.test_endpoint import post
from tests.invariants.traces import assert_same, merged, run, trace
from tests.runtimes.hybrid.warm import WarmCluster
from tests.runtimes.spmd.ranks import run_in_ranks
from tests.tiny import (
    ROOT,
    Workshop,
    eager_backend,
    load_module,
    metrics_without_times,
    recorded,
    weights_of,
    write_jsonl,
)

shapes = load_module(ROOT / "examples" / "vision" / "shapes.py")
VERIFIERS = """
def is_even(response: str) -> bool:
    return len(response) % 2 == 0
"""
LOOKS = """
from braidrl.agents.turns import Observation


class Looks:
    '''An environment whose second observation is an image, of the color that the example names.'''

    def reset(self, example):
        self.image, self.turns = example["shown"], 0

    def step(self, text):
        self.turns += 1
        said = [{"type": "text", "text": "where"}, {"type": "image_url", "image_url": {"url": self.image}}]
        return Observation([{"role": "user", "content": said}], reward=float(len(text) % 2), done=self.turns == 2)
"""
GRPO: dict[str, Any] = {
    "flow": "grpo",
    "rollout": {"samples_per_prompt": 4, "max_response_tokens": 4},
    "trainer": {"steps": 2, "prompts_per_step": 4, "learning_rate": 3e-3, "checkpoint_every": 1},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a tiny model that sees, and questions about drawings."""
    made = tmp_path_factory.mktemp("seeing")
    shapes.write_model(made / "model", 0, family="qwen3_vl")
    shapes.write_data(made, 12, 0, "train")
    return made


@pytest.fixture
def seeing(folder: Path, tmp_path: Path) -> Workshop:
    shop = Workshop(tmp_path, folder / "model", folder / "train.jsonl")
    (tmp_path / "even.py").write_text(VERIFIERS)
    (tmp_path / "looks.py").write_text(LOOKS)
    return shop


def settings(shop: Workshop, **sections: Any) -> dict[str, Any]:
    data = {"train": str(shop.data), "images": {"folder": str(shop.folder / "store")}}
    return merged({**GRPO, "data": data, "reward": {"verify": f"{shop.folder}/even.py:is_even"}}, sections)


@pytest.mark.soak
def test_a_replay_of_recorded_rows_with_images_gives_the_runs_weights(seeing: Workshop) -> None:
    made = seeing.run("made", **settings(seeing))
    assert all(len(spans) == 1 for spans in recorded(made, 1)["images"].values)
    again = seeing.run("again", replay=made, **settings(seeing))
    first, second = weights_of(made), weights_of(again)
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
    assert "data:image/png" in (made / "report.html").read_text()
    # The exported model sees, by its own files.
    saved = latest_checkpoint(made) / "actor"
    assert load_vision(saved, ImagesConfig()) is not None
    AutoModelForImageTextToText.from_pretrained(saved)


def test_a_stopped_run_with_images_resumes_exactly(seeing: Workshop) -> None:
    whole = seeing.run("whole", **settings(seeing))
    seeing.run("stopped", **settings(seeing, trainer={"steps": 1}))
    with TrainingRun(seeing.config("stopped", **settings(seeing)), resume=seeing.folder / "stopped") as resumed:
        resumed.train()
    assert latest_checkpoint(resumed.folder).name == latest_checkpoint(whole).name
    assert metrics_without_times(resumed.folder) == metrics_without_times(whole)
    first, second = weights_of(whole), weights_of(resumed.folder)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_an_image_in_the_second_turn_is_seen_and_its_tokens_are_trained(seeing: Workshop) -> None:
    def shown(*colors: str) -> str:
        images = [base64.b64encode(shapes.draw({0: ("square", color)})).decode() for color in colors]
        records = [{"prompt": "how many ?", "shown": f"data:image/png;base64,{image}"} for image in images]
        path = seeing.folder / f"{'-'.join(colors)}.jsonl"
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
        return str(path)

    result = []
    for colors in (("red",), ("blue",)):
        environment = {"environment": f"{seeing.folder}/looks.py:Looks", "samples_per_prompt": 2}
        sections = settings(seeing, data={"train": shown(*colors)}, rollout=environment, dtype="float32")
        backend = eager_backend(parse_config(seeing.tree("turns", **sections)))
        rows = backend.read(Admission([0])).rows
        stages = backend.executor.flow.stages
        played = rows.with_columns(dict(backend.executor.run(stages[0], rows, Sums())))
        worker = backend.executor.workers["actor"]
        log_probs = worker.forward("log_probs", played)
        assert torch.allclose(log_probs.values, played["rollout_log_probs"].values, atol=1e-5)
        result.append(played)
        backend.close()
    first, second = result
    turns = first["turn_lengths"][0].tolist()
    ((_, start, count),) = first["images"][0]
    assert len(turns) == 2 and start > int(first["prompt_length"][0]) and count == 9
    # The first turn does not know the image; the first token of the second one is drawn from another distribution.
    before, after = (played["rollout_log_probs"][0] for played in (first, second))
    assert torch.equal(before[: turns[0]], after[: turns[0]]) and before[turns[0]] != after[turns[0]]


@pytest.mark.soak
def test_adapters_of_the_text_part_learn_from_rows_with_images(seeing: Workshop) -> None:
    sft = {"rollout": {"samples_per_prompt": 1}, "trainer": {"steps": 10, "learning_rate": 4e-2, "lora": {"rank": 8}}}
    losses = [line["loss/actor"] for line in read_metrics(seeing.run("lora", **settings(seeing, flow="sft", **sft)))]
    assert min(losses[-3:]) < 0.8 * losses[0]


@pytest.mark.parametrize(
    ("rollout", "remedy"),
    [
        ({"engine": "http", "servers": {"urls": "http://127.0.0.1:1", "dialect": "sglang"}}, "engine=embedded or vllm"),
        ({"engine": "engine.py:Engine"}, "engine=embedded or vllm"),
        ({"engine": "vllm", "engines": 0}, "engines=1"),
    ],
)
def test_engines_that_take_no_images_are_refused_before_a_model_loads(
    rollout: dict[str, Any], remedy: str, seeing: Workshop
) -> None:
    (seeing.folder / "engine.py").write_text("def Engine(spec):\n    raise AssertionError\n")
    rollout = {name: str(seeing.folder / one) if one == "engine.py:Engine" else one for name, one in rollout.items()}
    with pytest.raises(UserError, match=f"images.*{remedy}"):
        prepare(seeing.config("refused", **settings(seeing, rollout=rollout)))


RECIPES: dict[str, dict[str, Any]] = {
    "dpo": {"rollout": {"samples_per_prompt": 2}},
    "reward_model": {"rollout": {"samples_per_prompt": 2}},
    "ppo": {
        "algorithm": {"reward": "verify"},
        "rollout": {"samples_per_prompt": 2},
        "trainer": {"train_vision": True},
    },
    "distillation": {"rollout": {"samples_per_prompt": 2}, "roles": {"reference": {"model": "other"}}},
}
SOAKED = ("reward_model", "distillation")


@pytest.mark.parametrize("recipe", ["dpo", "ppo", *(pytest.param(one, marks=pytest.mark.soak) for one in SOAKED)])
def test_every_recipe_trains_rows_with_images_together_as_alone(recipe: str, seeing: Workshop) -> None:
    pairs = [json.loads(line) for line in seeing.data.read_text().splitlines()][:4]
    for record, other in zip(pairs, reversed(pairs), strict=True):
        record |= {"chosen": record["answer"], "rejected": other["answer"]}
        record["images"] = [str(seeing.data.parent / name) for name in record["images"]]
    data = write_jsonl(seeing.folder / "pairs.jsonl", pairs)
    sections = merged(settings(seeing, data={"train": str(data)}, flow=recipe, dtype="float64"), RECIPES[recipe])
    if "roles" in sections:
        shapes.write_model(seeing.folder / "other", 1, family="qwen3_vl")
        sections["roles"] = {"reference": {"model": str(seeing.folder / "other")}}
    result = []
    for name, tokens in (("together", 4096), ("alone", 48)):
        trainer = {**sections["trainer"], "steps": 1, "max_tokens_per_device": tokens, "checkpoint_every": 0}
        folder = seeing.run(name, **{**sections, "trainer": trainer})
        trained = "reward" if recipe == "reward_model" else "actor"
        result.append((metrics_without_times(folder), weights_of(folder, trained)))
    (first, ours), (second, theirs) = result
    assert any(line.get("actor/grad_norm") or line.get("reward/grad_norm") for line in first)
    assert first == [pytest.approx(line, abs=1e-9) for line in second]
    for key, tensor in ours.items():
        # AdamW's first step magnifies the rounding of small gradients.
        torch.testing.assert_close(tensor, theirs[key], atol=1e-6, rtol=0)


def test_an_agents_images_are_seen_in_every_turn(folder: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(folder / "model")
    vision = load_vision(folder / "model", ImagesConfig(folder=tmp_path))
    assert vision is not None
    model = load_decoder(folder / "model").requires_grad_(False).eval()
    engine = EngineReplica(
        EmbeddedEngine(model, tokenizer, Decoding(16, 256), images=images_of(model, vision, 64, False))
    )
    template = TurnTemplate(PromptTemplate(tokenizer, vision=vision))

    async def play() -> Trajectory:
        async with Endpoint(engine, template, TurnSampling(SamplingParams(max_tokens=3), 256)) as endpoint:  # type: ignore[arg-type]
            url = endpoint.open(Trajectory((0, 0, 0)))
            messages: list[Any] = []
            for color in ("red", "blue"):
                uri = base64.b64encode(shapes.draw({0: ("square", color)})).decode()
                parts = [
                    {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{uri}"}},
                    {"type": "text", "text": "where ?"},
                ]
                messages.append({"role": "user", "content": parts})
                status, body = await post(url, messages)
                assert status == 200, body
                messages.append(body["choices"][0]["message"])
            local = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "/etc/hostname"}}]}]
            assert (await post(url, local))[0] == 400
            return await endpoint.close((0, 0, 0))

    played = asyncio.run(play())
    first, second = played.images
    assert first.name != second.name and len(played.sequence_lengths) == 1
    for span in played.images:
        assert played.tokens[span.start : span.start + span.tokens] == [vision.token] * 9
        assert not any(played.actions[span.start : span.start + span.tokens])


@pytest.mark.soak
def test_memory_stays_flat_over_300_steps_of_images_that_were_not_seen_before(folder: Path, tmp_path: Path) -> None:
    shop = Workshop(tmp_path, folder / "model", shapes.write_data(tmp_path, 1200, 0, "many"))
    (tmp_path / "even.py").write_text(VERIFIERS)
    kept = {"images": {"folder": str(tmp_path / "store"), "kept_mib": 1}, "shuffle": False}
    trainer = {"steps": 301, "checkpoint_every": 0, "learning_rate": 1e-4}
    sections = settings(shop, data=kept, trainer=trainer)
    resident = []
    with TrainingRun(shop.config("flat", **sections)) as training:
        for _ in range(300):
            training._one_step(training._snapshot())
            resident.append(psutil.Process().memory_info().rss / 2**20)
        seen = images_of_role(training)
        # More images than are kept: the oldest ones leave.
        assert seen.encoded_count > 100 + len(seen._cached) and seen._cached_bytes <= 2**20
    print(f"MiB after 50, 100, 200 and 300 steps: {[round(resident[n - 1]) for n in (50, 100, 200, 300)]}")
    assert resident[-1] - resident[99] < 16


def images_of_role(of: TrainingRun) -> Any:
    """Return the encoded images of an eager run's actor, which its engine shares."""
    return of.backend.executor.workers["actor"].images  # type: ignore[attr-defined]


def test_the_rows_of_a_group_share_one_encoded_image_in_engine_log_probs_and_updates(seeing: Workshop) -> None:
    sections = settings(seeing, rollout={"samples_per_prompt": 16}, algorithm={"old": "recompute", "kl_coef": 0.0})
    with TrainingRun(seeing.config("shared", **sections)) as made:
        made._one_step(made._snapshot())
        rows = recorded(made.folder, 1)["images"].values
        shown = {name for spans in rows for name, _, _ in spans}
        assert len(rows) == 64 and images_of_role(made).encoded_count == len(shown) <= 4


def encoded_images(folder: Path) -> tuple[Counter[str], int]:
    """Return how many images each stage of a run has encoded, and how many there are in its rows."""
    counts, shown = Counter[str](), set[str]()
    for line in read_metrics(folder):
        rows = recorded(folder, line["step"])["images"].values
        shown |= {name for spans in rows for name, _, _ in spans}
        for name, value in line.items():
            if name.startswith("images/"):
                counts[name.split("/")[1]] += round(value * len(rows))
    return counts, len(shown)


def check_encoded(folder: Path, ranks: int, apart: bool) -> None:
    """Assert that each rank of the actor encodes an image at most once, and engines that are `apart` too."""
    counts, shown = encoded_images(folder)
    generated, others = counts["actor.generate"], counts["actor.log_probs"] + counts["actor.update"]
    assert shown <= generated + others and counts["actor.update"] <= ranks * shown
    assert (max(generated, others) if apart else generated + others) <= ranks * shown, (folder.name, counts, shown)


@pytest.mark.soak
@pytest.mark.parametrize("trained", [False, True], ids=["frozen", "trained"])
def test_every_runtime_gives_the_result_of_eager_with_images(
    trained: bool, seeing: Workshop, warm_cluster: WarmCluster
) -> None:
    tower = {"trainer": {"train_vision": trained}}
    expected = run(seeing, "eager", **settings(seeing, **tower))
    # A trained tower encodes an image anew after each update.
    check = check_encoded if not trained else lambda *_, **__: None
    check(seeing.folder / "eager", 1, apart=False)
    for name, sections in (
        ("hybrid", {"runtime": "hybrid", "workers": 2}),
        ("streaming", {"runtime": "streaming"}),
    ):
        ours = run(seeing, name, **settings(seeing, **merged(tower, sections)))
        # Streaming counts waits and versions besides.
        known = expected[0].metrics.keys()
        ours = [replace(step, metrics={key: step.metrics[key] for key in known}) for step in ours]
        assert_same(ours, expected)
        check(seeing.folder / name, sections.get("workers", 1), apart=name == "streaming")
    layouts: dict[str, dict[str, Any]] = {"data": {}, "sequence": {"sequence": 2}, "context": {"context": 2}}
    layouts |= {"full": {"shard": "full"}, "pipeline": {"pipeline": 2}}
    trees = [
        seeing.tree(
            name,
            **merged(
                {"dtype": "float64"},
                settings(seeing, trainer={**tower["trainer"], "layout": layout, "keep_checkpoints": 4}),
            ),
            runtime="distributed",
            workers=2,
        )
        for name, layout in layouts.items()
    ]
    run_in_ranks(trees, 2)
    for name in layouts:
        assert_same(trace(seeing.folder / name), expected)
        check(seeing.folder / name, 2, apart=name not in ("data", "sequence", "context"))


@pytest.mark.soak
def test_suspended_rows_with_images_resume_alike_in_every_runtime_and_stay_within_the_bound(seeing: Workshop) -> None:
    partial = {
        "dtype": "float64",
        "algorithm": {"old": "recompute"},
        "rollout": {"tokens_per_iteration": 3, "max_response_tokens": 8},
        "trainer": {"steps": 4, "max_staleness": 2, "surplus": "keep", "keep_checkpoints": 4},
    }
    expected = run(seeing, "eager", **settings(seeing, **partial))
    tree = seeing.tree("ranks", **settings(seeing, **partial), runtime="distributed", workers=2)
    run_in_ranks([tree], 2)
    assert_same(trace(seeing.folder / "ranks"), expected)
    streamed = seeing.run("streamed", **settings(seeing, **merged(partial, {"runtime": "streaming"})))
    for made in (seeing.folder / "eager", streamed):
        rows = [(step, row) for step in range(1, 5) for row in recorded(made, step)["rollout_versions"].tolist()]
        spans = [spans for step in range(1, 5) for spans in recorded(made, step)["images"].values]
        assert all(step - 3 <= version <= step - 1 for step, row in rows for version in row)
        assert any(len(set(row)) > 1 for _, row in rows) and all(len(of_row) == 1 for of_row in spans)
