"""Models and data by hub names: fetched once by the real client, found in the cache without a network, refused in one
line.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import yaml

from tests.hub import COMMIT, TOKEN, Hub, serving
from tests.tiny import ROOT, Workshop, recorded, sums, write_model
from tests.tiny import braid as start_braid

UNREACHABLE = "http://127.0.0.1:1"
# Commands run one after the other in one process; an object sets the environment of later commands. The libraries have
# read theirs.
COMMANDS = """
import importlib, json, os, sys
import datasets.config, huggingface_hub.constants
from braidrl import cli
for module in (huggingface_hub.constants, datasets.config):
    importlib.reload(module)
for line in map(json.loads, sys.argv[1:]):
    if isinstance(line, dict):
        os.environ |= line
        continue
    sys.argv = ["braid", *line]
    try:
        cli.main()
    except SystemExit as end:
        print("ended", end.code or 0, file=sys.stderr)
sys.exit()
"""


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    """Serve the models tiny/sums, small/sums, gated/sums and private/sums, and the data set openai/gsm8k with some sums
    in it.
    """
    folder = tmp_path_factory.mktemp("hub")
    for organisation in ("tiny", "small", "gated", "private"):
        write_model(folder / "models" / organisation / "sums")
        # Files that only other programs need stay on the hub.
        (folder / "models" / organisation / "sums" / "model.onnx").write_bytes(b"large")
    gsm8k = folder / "datasets" / "openai" / "gsm8k"
    for subset, prompts in {"main": sums(40), "socratic": sums(3)}.items():
        (gsm8k / subset).mkdir(parents=True)
        rows = [{"question": row["prompt"], "answer": f"#### {row['answer']}"} for row in prompts]
        for split, part in {"train": rows[:30], "test": rows[30:] or rows[:1]}.items():
            table = pyarrow.Table.from_pylist([*part, {"question": "1+1=", "answer": "two"}])
            pyarrow.parquet.write_table(table, gsm8k / subset / f"{split}-00000-of-00001.parquet")
    files = [
        f"- config_name: {subset}\n  data_files:\n"
        + "".join(f"  - split: {split}\n    path: {subset}/{split}-*\n" for split in ("train", "test"))
        for subset in ("main", "socratic")
    ]
    (gsm8k / "README.md").write_text(f"---\nconfigs:\n{''.join(files)}---\n# GSM8K\n")
    with serving(folder) as served:
        yield served


def braid(hub: str, cache: Path, *commands: list[str] | dict[str, str], **environment: str) -> list[tuple[int, str]]:
    """Return the exit code and stderr of each command."""
    with pytest.MonkeyPatch.context() as patched:
        for name, value in {"HF_HOME": str(cache), "HF_ENDPOINT": hub, **environment}.items():
            patched.setenv(name, value)
        process = start_braid(*map(json.dumps, commands), prefix=COMMANDS)
    with process:
        _, output = process.communicate(timeout=280)
    parts = output.split("ended ")
    assert len(parts) == sum(isinstance(command, list) for command in commands) + 1, output
    codes = [part.partition("\n") for part in parts[1:]]
    return [(int(codes[i][0]), (parts[i] if i == 0 else codes[i - 1][2])) for i in range(len(codes))]


def refused(said: tuple[int, str]) -> str:
    """Return the one line of a refusal."""
    code, text = said
    lines = [line for line in text.splitlines() if line.startswith("braid: ")]
    assert code == 2 and len(lines) == 1 and "Traceback" not in text, text
    return lines[0].removeprefix("braid: ")


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory, tiny_models: dict[str, Path], sums_file: Path) -> Workshop:
    return Workshop(tmp_path_factory.mktemp("runs"), tiny_models["qwen3"], sums_file)


@pytest.fixture(scope="module")
def configuration(workshop: Workshop) -> str:
    return str(workshop.config_file(trainer={"steps": 1}))


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def said(hub: Hub, workshop: Workshop, configuration: str, cache: Path) -> dict[str, tuple[int, str]]:
    """Return the output of all commands that reach the hub."""
    page = [str(ROOT / "examples" / "gsm8k" / "config.yaml"), "model=small/sums", "data.train=openai/gsm8k"]
    held_out, small = "data.eval={test: openai/gsm8k}", ["data.system_prompt=null", "rollout.max_response_tokens=8"]
    sizes = [
        "rollout.samples_per_prompt=2",
        "trainer.prompts_per_step=2",
        "trainer.rows_per_update=4",
        "trainer.steps=1",
    ]
    own = [f"output={workshop.folder}", "name=page", "dtype=float32", "threads=1", "evaluation.every=0", "data.eval={}"]
    dry = {
        name: ["train", configuration, f"model={name}", "--dry-run"]
        for name in ("tiny/summs", "tiny/sums@v2", "gated/sums", "private/sums")
    }
    commands = {
        "shown": ["data", *page, held_out, *small],
        "trained": ["train", *page, *small, *sizes, *own],
        "by name": ["train", configuration, "model=tiny/sums@v1"],
        "resumed": ["train", "--resume", str(workshop.folder / "run"), "trainer.steps=2"],
        **dry,
    }
    allowed = {f"{name} with a token": dry[name] for name in ("gated/sums", "private/sums")}
    spoken = braid(hub.url, cache, *commands.values(), {"HF_TOKEN": TOKEN}, *allowed.values())
    return dict(zip([*commands, *allowed], spoken, strict=True))


def test_the_first_page_is_followed_with_names_alone(said: dict[str, tuple[int, str]], workshop: Workshop) -> None:
    assert (said["shown"][0], said["trained"][0]) == (0, 0), said
    table = recorded(workshop.folder / "page", 1)
    assert {row["answer"].isdigit() for row in table["metadata"]} == {True}
    assert "1 records left out" in said["trained"][1]
    source = yaml.safe_load((workshop.folder / "page" / "config.yaml").read_text())["data"]["train"][0]
    assert source["path"].endswith(f"datasets--openai--gsm8k/snapshots/{COMMIT}")
    assert (source["convert"], source["subset"]) == ("gsm8k", "main")


def test_a_fetched_model_is_found_in_the_cache_without_a_network(
    said: dict[str, tuple[int, str]], hub: Hub, workshop: Workshop, configuration: str, cache: Path
) -> None:
    assert (said["by name"][0], said["resumed"][0]) == (0, 0), said
    folder = cache / "hub" / "models--tiny--sums" / "snapshots" / COMMIT
    assert (folder / "model.safetensors").is_file() and not (folder / "model.onnx").exists()
    assert yaml.safe_load((workshop.folder / "run" / "config.yaml").read_text())["model"] == str(folder), (
        "a run stays on its commit"
    )
    files = [asked for asked in hub.asked if asked.startswith("GET /tiny")]
    assert files and len(files) == len(set(files)), "each file was fetched once"
    there, missing = braid(
        UNREACHABLE,
        cache,
        ["train", configuration, "model=tiny/sums@v1", "name=another"],
        ["train", configuration, "model=tiny/other"],
        HF_HUB_OFFLINE="1",
    )
    assert there[0] == 0, there
    assert "HF_HUB_OFFLINE is set" in refused(missing)


def test_what_the_hub_does_not_have_or_give_is_one_line(said: dict[str, tuple[int, str]], hub: Hub) -> None:
    names = ("tiny/summs", "tiny/sums@v2", "gated/sums", "private/sums")
    unknown, revision, gated, private = (refused(said[name]) for name in names)
    assert re.match(rf"model: .*tiny/summs .*{hub.url} .*set HF_TOKEN", unknown)
    assert re.match(rf"model: tiny/sums .*revision 'v2' at {hub.url}; write .*after the @$", revision)
    assert re.match(rf"model: gated/sums .*accept them at {hub.url}/", gated)
    assert re.match(r"model: .*no file or folder private/sums ", private)
    assert [said[f"{name} with a token"][0] for name in ("gated/sums", "private/sums")] == [0, 0]


def test_without_a_network_one_line_explains_how_to_fetch_a_model(configuration: str, tmp_path: Path) -> None:
    model, data, both = braid(
        UNREACHABLE,
        tmp_path,
        ["train", configuration, "model=tiny/sums@v1"],
        ["train", configuration, "data.train=tiny/data"],
        ["train", configuration, "model=tiny/sums", "data.train=tiny/data", "--dry-run"],
    )
    fetch = "`hf download tiny/sums --revision v1` .*HF_HOME"
    assert re.match(rf"model: .*tiny/sums .*{tmp_path}/hub .*{UNREACHABLE} .*{fetch}", refused(model))
    assert "`hf download tiny/data --repo-type dataset`" in refused(data)
    assert both[0] == 2 and both[1].count("`hf download tiny/") == 2 and "2 things to change" in both[1], both[1]
