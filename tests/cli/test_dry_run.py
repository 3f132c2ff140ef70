"""`braid train --dry-run` shows the devices of each runtime and their memory, and does nothing else."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import pytest
import torch
from rich.console import Console
from transformers import Qwen2Config

from braidrl.cli.commands import app
from braidrl.cli.dry_run import dry_run
from braidrl.config import Config, load_config
from braidrl.errors import UserError
from braidrl.runtimes.memory.budget import ENGINE, FREED, IMAGES, PANELS, RoleUse, peak
from tests.cases import soak_but
from tests.tiny import ROOT, TOKENIZER, Workshop, load_module
from tests.training.decoders.families import family_config


def uses(found: Any) -> list[tuple[int, tuple[RoleUse, ...]]]:
    return [(group.devices, tuple(sorted(group.uses, key=str))) for group, _ in found]


ACTOR, CRITIC, REFERENCE = (
    RoleUse("actor", True, True),
    RoleUse("critic", True, False),
    RoleUse("reference", False, False),
)
PPO: dict[str, Any] = {
    "flow": "ppo",
    "algorithm": {"kl_coef": 0.1, "reward": "verify"},
    "rollout": {"max_response_tokens": 8},
}


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        ({}, [(1, (ACTOR, CRITIC, REFERENCE))]),
        ({"runtime": "distributed", "workers": 4}, [(4, (ACTOR, CRITIC, REFERENCE))]),
        ({"runtime": "hybrid", "placement": "split", "workers": 2}, [(2, (ACTOR,)), (2, (CRITIC, REFERENCE))]),
        (
            {"runtime": "streaming", "streaming": {"workers": {"actor.generate": 3}}},
            [
                (3, (RoleUse("actor", False, True, is_separate=True),)),
                (1, (RoleUse("actor", True, False),)),
                (1, (CRITIC,)),
                (1, (REFERENCE,)),
            ],
        ),
    ],
)
def test_every_runtime_puts_its_roles_on_devices(workshop: Workshop, sections: Any, expected: Any) -> None:
    result = dry_run(workshop.config(**PPO, **sections), Console(file=StringIO()))
    assert sorted(uses(result), key=str) == sorted(expected, key=str)


def test_a_trained_role_takes_more_than_a_frozen_one_and_roles_take_turns(workshop: Workshop) -> None:
    ((_, footprints),) = dry_run(workshop.config(**PPO), Console(file=StringIO()))
    by_role = {one.use.role: one for one in footprints}
    assert by_role["actor"].resident.keys() - by_role["critic"].resident.keys() == set(FREED)
    assert by_role["reference"].resident.keys() == {"weights"}
    working = [sum(one.working.values()) for one in footprints]
    staying = sum(size for one in footprints for part, size in one.resident.items() if part not in FREED)
    generating = sum(by_role["actor"].resident[part] for part in FREED)
    assert peak(footprints) == staying + max(*working, generating) < 2**30


def test_an_engine_that_sleeps_takes_no_keys_and_values_while_others_work(workshop: Workshop) -> None:
    shown = StringIO()
    ((_, footprints),) = dry_run(workshop.config(**{**PPO, "rollout": {"slots": 4096}}), Console(file=shown, width=120))
    cache = next(one.resident["keys and values"] for one in footprints if one.use.generates)
    everything, working = (
        sum(sum(part.values()) for part in parts)
        for parts in zip(*((one.resident, one.working) for one in footprints), strict=True)
    )
    assert cache > working and peak(footprints) == everything
    assert "that leaves while roles infer or train: actor" in shown.getvalue()


def test_a_role_that_infers_in_another_layout_has_a_copy_of_its_weights(workshop: Workshop) -> None:
    def resident(**trainer: Any) -> dict[str, dict[str, int]]:
        shown.truncate(0)
        sections = {**PPO, "algorithm": {**PPO["algorithm"], "old": "recompute"}, "trainer": trainer}
        config = workshop.config(**sections, runtime="distributed", workers=2)
        ((_, footprints),) = dry_run(config, Console(file=shown, width=120))
        return {one.use.role: one.resident for one in footprints}

    shown = StringIO()
    plain, result = resident(), resident(inference_layout={"tensor": 2})
    for role in ("actor", "critic"):
        assert result[role] == {**plain[role], "weights to infer with": plain[role]["weights"] // 2}
    assert result["reference"] == plain["reference"]
    generating = plain["actor"]["weights"] + sum(plain["actor"][part] for part in FREED)
    resident(inference_layout={"tensor": 2}, resident_gib=generating * 1.001 / 2**30)
    assert "actor inference" in shown.getvalue() and "critic inference" in shown.getvalue()


def test_ranks_that_decode_together_have_slices_of_the_weights_and_of_keys_and_values(workshop: Workshop) -> None:
    def actor(**rollout: Any) -> dict[str, int]:
        config = workshop.config(rollout=rollout, runtime="distributed", workers=2)
        ((_, (result, *_)),) = dry_run(config, Console(file=StringIO()))
        return result.resident

    whole, half = actor(), actor(tensor=2)
    assert half["weights of the engine"] == whole["weights"] // 2
    assert half["keys and values"] == whole["keys and values"] // 2


@pytest.mark.parametrize("runtime", ["eager", "streaming"])
def test_policies_on_a_shared_base_count_it_and_its_engine_once(workshop: Workshop, runtime: str) -> None:
    sections: dict[str, Any] = {
        "flow": str(ROOT / "tests" / "runtimes" / "two_policies.yaml"),
        "trainer": {"lora": {"rank": 2}},
        "runtime": runtime,
    }

    def generating(shared: bool) -> tuple[dict[str, dict[str, int]], int]:
        result = dry_run(workshop.config(**sections, rollout={"shared_base": shared}), Console(file=StringIO()))
        footprints = next(each for group, each in result if any(use.generates for use in group.uses))
        return {one.use.role: one.resident for one in footprints}, peak(footprints)

    (shared, least), (own, most) = generating(True), generating(False)
    assert "keys and values" in own["rival"] and "keys and values" not in shared["rival"]
    assert shared["rival"]["weights"] < own["rival"]["weights"] / 4 and least < most
    assert shared["actor"]["weights"] == own["actor"]["weights"]
    assert ENGINE not in shared["actor"]


def test_servers_hold_keys_and_values_on_devices_of_their_own(workshop: Workshop) -> None:
    def resident(**rollout: Any) -> set[str]:
        ((_, (actor, *_)),) = dry_run(workshop.config(rollout=rollout), Console(file=StringIO()))
        return set(actor.resident)

    assert resident() - resident(engine="http", servers="http://127.0.0.1:9") == set(FREED)
    assert resident() - resident(compile=False) == {PANELS}


def test_dry_run_reads_no_weights_and_writes_nothing(workshop: Workshop, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(workshop.model, bare, ignore=shutil.ignore_patterns("*.safetensors"))
    shown = StringIO()
    before = files_in(workshop.folder)
    config = workshop.config(model=str(bare), dtype="bfloat16", output=str(tmp_path / "runs"))
    dry_run(config, Console(file=shown, width=120))
    assert not (tmp_path / "runs").exists()
    assert files_in(workshop.folder) == {*before, workshop.folder / "run.yaml"}
    for part in ("weights", "gradients", "master weights", "AdamW moments", "keys and values", "activations", "logits"):
        assert part in shown.getvalue()
    assert "16 rows, 1 updates" in shown.getvalue()


@pytest.mark.parametrize(
    ("kind", "changes"), [("qwen3_moe", {}), ("mixtral", {}), ("qwen2_moe", {"decoder_sparse_step": 2})]
)
def test_a_dry_run_shows_all_and_active_parameters_of_a_mixture_in_float32(
    workshop: Workshop, kind: str, changes: dict[str, int]
) -> None:
    family_config(kind, **changes).save_pretrained(workshop.folder / "mixture")
    TOKENIZER.save_pretrained(workshop.folder / "mixture")
    shown = StringIO()
    dry_run(workshop.config(model=str(workshop.folder / "mixture"), dtype="float32"), Console(file=shown, width=200))
    assert re.search(r"[\d.]+M parameters, [\d.]+M active", shown.getvalue()) and "verdict: fits" in shown.getvalue()


def test_a_dry_run_for_other_devices_takes_their_memory_and_data_type(
    workshop: Workshop, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(workshop.config_file(device="auto", runtime="distributed", workers=8))
    app(["train", path, "--dry-run", "--devices", "8xH100-80GB"], standalone_mode=False)
    shown = capsys.readouterr().out
    assert "of the 80" in shown.replace("80.0 GiB", "80 GiB") and "master weights" in shown and "cuda:0" in shown
    app(["train", path, "--dry-run"], standalone_mode=False)
    assert "master weights" not in capsys.readouterr().out, "float32 on this machine's CPU"
    for devices, named in {"4xH100-80GB": "4xH100-80GB", "8xH100": "H100-80GB"}.items():
        with pytest.raises(UserError, match=named):
            app(["train", path, "--dry-run", "--devices", devices], standalone_mode=False)
    with pytest.raises(UserError, match="--dry-run"):
        app(["train", path, "--devices", "8xH100-80GB"], standalone_mode=False)


def test_dry_run_refuses_what_a_run_refuses(workshop: Workshop, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError, match="no rollout engine is called 'turbo'"):
        dry_run(workshop.config(rollout={"engine": "turbo"}))
    app(["train", str(workshop.config_file()), "--dry-run"], standalone_mode=False)
    assert "nothing was trained" in capsys.readouterr().out


QWEN = {
    "0.5b": (896, 4864, 24, 14, 2, 151936, 494),
    "7b": (3584, 18944, 28, 28, 4, 152064, 7616),
    "32b": (5120, 27648, 64, 40, 8, 152064, 32764),
}
"""Sizes of Qwen2.5 from the published configurations, and the resulting millions of parameters."""


def write_qwen(folder: Path, name: str) -> Path:
    """Write the configuration of a Qwen2.5 without its weights."""
    width, intermediate, layers, heads, key_value_heads, vocabulary, _ = QWEN[name]
    model = folder / name
    Qwen2Config(
        hidden_size=width,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_value_heads,
        vocab_size=vocabulary,
        tie_word_embeddings=name == "0.5b",
        max_position_embeddings=131072,
        architectures=["Qwen2ForCausalLM"],
    ).save_pretrained(model)
    TOKENIZER.save_pretrained(model)
    return model


@pytest.mark.parametrize("name", soak_but(["7b"], QWEN))
def test_the_configurations_for_qwen_run_dry(workshop: Workshop, name: str) -> None:
    model = write_qwen(workshop.folder, name)
    files = [f"data.train={workshop.data}", f"data.eval.aime={workshop.data}", f"model={model}"]
    config = load_config(ROOT / "examples" / "dapo_math" / f"qwen2.5-{name}.yaml", files)
    ((group, (actor,)),) = dry_run(config, Console(file=StringIO()))
    assert round(actor.shape.parameters / 1e6) == QWEN[name][-1]
    assert group.devices == config.workers
    assert peak([actor]) < {"0.5b": 24e9, "7b": 80e9, "32b": 80e9}[name]


SMALL: dict[str, Any] = {
    "lora": {"rank": 16, "base_dtype": "nf4"},
    "optimizer": "adamw8bit",
    "activation_checkpointing": True,
    "max_tokens_per_device": 4096,
}
FULL = {name: value for name, value in SMALL.items() if name != "lora"}


@pytest.mark.parametrize(
    ("trainer", "gib"),
    [
        (SMALL, 8.53),
        pytest.param({**SMALL, "lora": {"rank": 16}}, 17.26, marks=pytest.mark.soak),
        pytest.param({**SMALL, "optimizer": "adamw"}, 8.75, marks=pytest.mark.soak),
        pytest.param(FULL, 87.96, marks=pytest.mark.soak),
        pytest.param({**FULL, "optimizer": "adamw"}, 130.29, marks=pytest.mark.soak),
    ],
    ids=["all of them", "without 4 bits", "without 8 bits", "without adapters", "without any"],
)
def test_memory_of_a_7b_model_on_24_gib_with_and_without_quantisation(
    workshop: Workshop, trainer: Any, gib: float
) -> None:
    model, shown = write_qwen(workshop.folder, "7b"), StringIO()
    config = workshop.config(
        flow="dapo",
        model=str(model),
        device="cuda",
        trainer=trainer,
        data={"max_prompt_tokens": 512},
        rollout={"max_response_tokens": 1024, "slots": 32},
    )
    ((_, (actor,)),) = dry_run(config, Console(file=shown, width=120))
    assert peak([actor]) / 2**30 == pytest.approx(gib, abs=0.01)
    assert "AdamW moments" in shown.getvalue() and "keys and values" in shown.getvalue()


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, float], None]:
    """Return a function that simulates a number of CUDA devices with some GiB each."""

    def invent(count: int, gib: float) -> None:
        about = SimpleNamespace(total_memory=int(gib * 2**30))
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: about)

    return invent


def chosen(config: Config) -> str:
    shown = StringIO()
    dry_run(config, Console(file=shown, width=200))
    return "\n".join(line for line in shown.getvalue().splitlines() if line.startswith("chosen for"))


@pytest.mark.parametrize(
    ("gib", "rollout", "trainer", "said"),
    [
        (80, {}, {}, "rollout.slots=688, trainer.max_tokens_per_device=65536"),
        pytest.param(24, {}, {}, "rollout.slots=80, trainer.max_tokens_per_device=15360", marks=pytest.mark.soak),
        pytest.param(80, {"slots": 5}, {}, "trainer.max_tokens_per_device=65536", marks=pytest.mark.soak),
        pytest.param(80, {}, {"max_tokens_per_device": 7000}, "rollout.slots=688", marks=pytest.mark.soak),
        pytest.param(80, {"slots": 5}, {"max_tokens_per_device": 7000}, "", marks=pytest.mark.soak),
        (
            80,
            {"engine": "vllm"},
            {},
            "rollout.slots=256, trainer.max_tokens_per_device=50176, rollout.vllm.gpu_memory_utilization=0.44",
        ),
    ],
)
def test_slots_and_tokens_are_chosen_by_the_memory_of_the_device(
    workshop: Workshop, device: Any, gib: int, rollout: dict[str, Any], trainer: dict[str, Any], said: str
) -> None:
    device(1, gib)
    config = workshop.config(
        flow="dapo",
        model=str(write_qwen(workshop.folder, "7b")),
        device="cuda",
        dtype="bfloat16",
        data={"max_prompt_tokens": 512},
        rollout={"max_response_tokens": 1024, "samples_per_prompt": 16, "slots": None, **rollout},
        trainer={"prompts_per_step": 64, "lora": {}, "activation_checkpointing": True, **trainer},
    )
    assert chosen(config).partition(": ")[2] == said


def test_rows_longer_than_usual_need_no_setting_where_memory_decides(workshop: Workshop, device: Any) -> None:
    model = str(write_qwen(workshop.folder, "0.5b"))
    config = workshop.config(model=model, device="cuda", rollout={"max_response_tokens": 9000})
    with pytest.raises(UserError, match="max_tokens_per_device=8192 is the most"):
        dry_run(config, Console(file=StringIO()))
    device(1, 24)
    assert "trainer.max_tokens_per_device=" in chosen(config)


@pytest.mark.soak
def test_a_vllm_memory_share_that_training_needs_is_refused(workshop: Workshop, device: Any) -> None:
    def asking(devices: int, mib: int, **rollout: Any) -> None:
        device(devices, mib / 1024)
        config = workshop.config(device="cuda", dtype="float32", rollout={"engine": "vllm", "vllm": rollout})
        dry_run(config, Console(file=StringIO()))

    asks = r"gpu_memory_utilization=0\.9 .*0\.\d MiB .*1\.0 MiB, .*training"
    with pytest.raises(UserError, match=asks):
        asking(1, 1)
    asking(2, 1)
    asking(1, 100_000)
    asking(1, 100_000, gpu_memory_utilization=0.5)
    with pytest.raises(UserError, match=r"gpu_memory_utilization=0\.99 asks"):
        asking(1, 100, gpu_memory_utilization=0.99)
    asking(1, 100, gpu_memory_utilization=0.95, enable_sleep_mode=True)


def test_a_layout_that_does_not_fit_is_refused(workshop: Workshop) -> None:
    settings: dict[str, Any] = {"runtime": "distributed", "workers": 4}
    with pytest.raises(UserError, match=r"3 devices .* there are 4"):
        dry_run(workshop.config(trainer={"layout": {"data": 3}}, **settings))
    with pytest.raises(UserError, match="2 key/value heads"):
        dry_run(workshop.config(trainer={"layout": {"tensor": 4}}, **settings))


def files_in(folder: Path) -> set[Path]:
    """Return all files except Python's bytecode caches."""
    return {path for path in folder.rglob("*") if path.is_file() and path.parent.name != "__pycache__"}


def test_the_geometry_example_passes_its_dry_run_on_a_local_folder_in_the_hubs_form(tmp_path: Path) -> None:
    shapes = load_module(ROOT / "examples" / "vision" / "shapes.py")
    model = shapes.write_model(tmp_path / "model", 0, family="qwen2_5_vl")
    images = datasets.Features(
        {
            "images": datasets.List(datasets.Image()),
            "problem": datasets.Value("string"),
            "answer": datasets.Value("string"),
        }
    )
    rows = {"images": [[{"bytes": shapes.draw({0: ("square", "red")}), "path": None}]], "problem": ["<image>Find x."]}
    (tmp_path / "geometry3k").mkdir()
    for split in ("train", "test"):
        made = datasets.Dataset.from_dict({**rows, "answer": ["3"]}, images)
        made.to_parquet(tmp_path / "geometry3k" / f"{split}-00000-of-00001.parquet")
    source = f"{{path: {tmp_path / 'geometry3k'}, prompt_field: problem}}"
    changes = {
        "model": model,
        "data.train": source,
        "data.eval.test": source,
        "data.images.folder": tmp_path / "store",
        "data.max_prompt_tokens": 128,
        "rollout.max_response_tokens": 64,
        "dtype": "float32",
        "device": "cpu",
    }
    config = load_config(
        ROOT / "examples" / "vision" / "geometry3k.yaml", [f"{name}={value}" for name, value in changes.items()]
    )
    ((_, footprints),) = dry_run(config, Console(file=StringIO()))
    (actor,) = (one for one in footprints if one.use.role == "actor")
    kept = config.data.images.kept_mib * 2**20
    assert actor.shape.tower > 0 and actor.resident[IMAGES] == kept
    assert peak(footprints) > len(footprints) * kept == 2 * kept, "images stay while other roles work"
    # An engine with merged weights encodes images itself, and keeps them.
    changes |= {"trainer.lora": "{}", "algorithm.kl_coef": 0}
    config = load_config(
        ROOT / "examples" / "vision" / "geometry3k.yaml", [f"{name}={value}" for name, value in changes.items()]
    )
    ((_, (adapted, *_)),) = dry_run(config, Console(file=StringIO()))
    assert adapted.resident[IMAGES] == 2 * kept
