"""Hostile configurations, models, templates and data: each ends in one line with file and place, in little time and
memory.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from braidrl.config import SourceConfig, load_config, parse_config
from braidrl.data import chat
from braidrl.data.sources import Reading
from braidrl.errors import UserError
from braidrl.flow.yaml_form import from_yaml
from braidrl.runtimes.prepare.first_checks import check_first
from braidrl.runtimes.prepare.setup import prepare
from tests.tiny import Workshop

BASE = "flow: grpo\nmodel: /nowhere\n"
MOST_S = 5.0
"""CPU seconds of any refusal."""


def refusal(call: Callable[[], Any]) -> str:
    """The one line that a call ends with."""
    start = time.process_time()
    with pytest.raises(UserError) as refused:
        call()
    said = str(refused.value)
    assert time.process_time() - start < MOST_S
    assert len(said) < 1000 and said.isprintable(), said[:1000]
    return said


def laughs(lists: int) -> str:
    """A billion laughs and more: each list names the one before ten times."""
    return "a0: &a0 [1]\n" + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, lists))


YAML: dict[str, tuple[str | bytes, str]] = {
    "itself": ("algorithm: &a {x: *a}\n", "the alias *a contains itself"),
    "itself in a list": ("algorithm: &a [1, [2, *a]]\n", "the alias *a contains itself"),
    "a billion laughs": (laughs(12), "more than 100000 values"),
    "merged laughs": (
        "b0: &b0 {x: 1}\n" + "".join(f"b{n}: &b{n} {{<<: [*b{n - 1}, *b{n - 1}]}}\n" for n in range(1, 40)),
        "more than 100000 values",
    ),
    "5,000 levels": ("algorithm: " + "[" * 5000 + "]" * 5000, "nested more than 64 levels"),
    "900 levels": ("algorithm: " + "{a: " * 900 + "1" + "}" * 900, "nested more than 64 levels"),
    "levels by indentation": (
        "algorithm:\n" + "".join(" " * n + "a:\n" for n in range(1, 200)),
        "nested more than 64 levels",
    ),
    "Latin-1": ("name: h\xe9\n".encode("latin-1"), "is not UTF-8; save the file as UTF-8"),
    "UTF-16": ("name: a\n".encode("utf-16"), "is not UTF-8"),
    "a key twice": ("flow: dapo\n", "the key 'flow' is there twice"),
    "two megabytes": ("#" * 2_000_000, "at most 1048576"),
    "a NUL": ("name: a\0\n", "is not YAML"),
    "a number of 5,000 digits": ("seed: " + "9" * 5000, "is not YAML"),
    "a tag": ("name: !!python/object/apply:os.getcwd []\n", "could not determine a constructor"),
}


@pytest.mark.parametrize("kind", YAML)
def test_hostile_yaml_is_refused_with_its_file(tmp_path: Path, kind: str) -> None:
    content, reason = YAML[kind]
    path = tmp_path / "run.yaml"
    raw = content if isinstance(content, bytes) else content.encode()
    path.write_bytes(BASE.encode() + raw)
    message = refusal(lambda: load_config(path))
    assert message.startswith(str(path)) and reason in message
    flow = tmp_path / "flow.yaml"
    flow.write_bytes(b"flow: own\nstages: []\n" + raw)
    assert str(flow) in refusal(lambda: from_yaml(flow))


LONG_NAMES = {
    "300 letters": f"name={'a' * 300}",
    "201 letters": f"name={'a' * 201}",
    "90 snowmen": f"name={'☃' * 90}",
}
VALUES = {
    **dict.fromkeys(LONG_NAMES.values(), "1 to 200 bytes"),
    "rollout.slots=1000000000000": "less than or equal to 65536",
    "threads=1000000000": "less than or equal to 65536",
    "workers=1000000": "less than or equal to 65536",
    "streaming.workers={compute: 1000000}": "less than or equal to 65536",
    "trainer.layout={tensor: 10000000}": "less than or equal to 65536",
    "seed=1180591620717411303424": "a whole number of 64 bits",
    "seed=-9999999999999999999": "a whole number of 64 bits",
    "rollout.max_response_tokens=1000000000000": "less than or equal to",
    "reward.timeout_s=.inf": "a finite number",
    "cluster.wait_limit_s=1e300": "less than or equal to 1000000",
    "rollout.environment.timeout_s=nan": "a finite number",
    "algorithm={kl_coef: .nan}": "algorithm.kl_coef: Input should be a finite number",
    "trainer.optimizer_settings={a: [1, {b: -.inf}]}": (
        "trainer.optimizer_settings.a.1.b: Input should be a finite number"
    ),
    "trainer.learning_rate=.inf": "trainer.learning_rate: Input should be a finite number",
    "trainer.learning_rate=1e400": "trainer.learning_rate: Input should be a finite number",
    "trainer.learning_rate=1e39": "trainer.learning_rate: Input should be less than or equal to 100",
    "trainer.learning_rate=.nan": "trainer.learning_rate: Input should be a finite number",
    "roles.actor.learning_rate=1e39": "roles.actor.learning_rate: Input should be less than or equal to 100",
    "trainer.weight_decay=1e39": "trainer.weight_decay: Input should be less than or equal to 100",
    "name=../../elsewhere": "neither slashes nor control characters",
    "name=/tmp/elsewhere": "neither slashes nor control characters",
    "name=a/../../b": "neither slashes nor control characters",
    "name=..": "does not begin with a dot",
    'name="a\\0b"': "text without NUL",
    'name="\\0"': "text without NUL",
    'output="runs\\0"': "text without NUL",
    'name="a\\rb"': "nor control characters",
    'name="a\\u2028b"': "nor control characters",
    'name="a\\nb"': "nor control characters",
    'name="\\x1b[2Ja"': "nor control characters",
    'name="a\\u202eb"': "nor control characters",
    "name=''": "1 to 200 bytes",
    "data.eval={../../x: a.jsonl}": "neither slashes nor control characters",
    'data.train="a\\0.jsonl"': "text without NUL",
    "algorithm=" + "[" * 3000: "nested more than 64 levels",
    "a." * 3000 + "b=1": "nested more than 64 levels",
    "name=\ud800": "half of a character",
}


@pytest.mark.parametrize("override", VALUES, ids=range(len(VALUES)))
def test_a_value_that_no_run_can_have_is_refused_with_its_key(tmp_path: Path, override: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(BASE)
    assert VALUES[override] in refusal(lambda: load_config(path, [override]))


@pytest.fixture
def damaged(workshop: Workshop) -> Callable[[str, bytes], str]:
    """The line that a run of a model ends with, one file of which has other content."""

    def prepared(name: str, content: bytes) -> str:
        folder = workshop.folder / "damaged"
        shutil.copytree(workshop.model, folder, dirs_exist_ok=True)
        (folder / name).write_bytes(content)
        message = refusal(lambda: prepare(parse_config({**workshop.tree(), "model": str(folder)})))
        assert str(folder) in message or ".jsonl" in message
        return message

    return prepared


CONFIG: dict[str, tuple[dict[str, Any], str]] = {
    "negative layers": ({"num_hidden_layers": -1}, "num_hidden_layers is -1"),
    "no layers": ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
    "a million layers": ({"num_hidden_layers": 10**6}, "num_hidden_layers is 1000000"),
    "no heads": ({"num_attention_heads": 0}, "num_attention_heads is 0"),
    "heads that do not divide": ({"num_attention_heads": 5, "num_key_value_heads": 2}, "does not divide"),
    "a size as text": ({"hidden_size": "32"}, "hidden_size is '32'"),
    "no size": ({"hidden_size": None}, "hidden_size is None"),
    "a size beyond memory": ({"hidden_size": 2**40}, "hidden_size is 1099511627776"),
    "a truth as a size": ({"vocab_size": True}, "vocab_size is True"),
    "an epsilon that is no number": ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
    "a rope that is not known": ({"rope_parameters": {"rope_type": "nope"}}, "cannot be loaded"),
    "an activation that is not known": ({"hidden_act": "nope"}, "cannot be loaded"),
    "an end beyond the vocabulary": ({"eos_token_id": 9999}, "eos_token_id of config.json is 9999"),
    "a negative end": ({"eos_token_id": -1}, "eos_token_id of config.json is -1"),
    "one of two ends beyond": ({"eos_token_id": [1, 70000]}, "eos_token_id of config.json is 70000"),
    "a vocabulary smaller than the tokenizer's": ({"vocab_size": 5}, "is beyond it"),
    "architectures that are none": ({"architectures": 3}, "architectures is 3"),
}


@pytest.mark.parametrize("kind", CONFIG)
def test_a_models_configuration_that_cannot_be_is_refused_with_its_key(
    workshop: Workshop, damaged: Callable[[str, bytes], str], kind: str
) -> None:
    changes, reason = CONFIG[kind]
    whole = json.loads((workshop.model / "config.json").read_text())
    assert reason in damaged("config.json", json.dumps({**whole, **changes}).encode())


TEXTS = {
    "a list": b"[]",
    "deep": b"[" * 10_000,
    "deep objects": b'{"a":' * 10_000,
    "no text": bytes(range(256)),
    "empty": b"",
    "a text": b'"a"',
}


@pytest.mark.parametrize("kind", TEXTS)
@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"])
def test_a_file_of_a_model_that_is_no_object_is_named(
    damaged: Callable[[str, bytes], str], name: str, kind: str
) -> None:
    assert name in damaged(name, TEXTS[kind])


TOKENIZERS = {
    "tokenizer.json": [
        b"{}",
        b'{"model": {}}',
        b'{"version": "1.0", "added_tokens": [], "model": {"type": "BPE", "vocab": {"a": -1}}}',
    ],
    "tokenizer_config.json": [b'{"model_max_length": "x"}', b'{"eos_token": 5}', b'{"chat_template": 5}'],
    "generation_config.json": [b'{"eos_token_id": 7777}', b'{"eos_token_id": "x"}'],
}
CASES = [(name, content) for name, contents in TOKENIZERS.items() for content in contents]


@pytest.mark.parametrize(("name", "content"), CASES)
def test_a_tokenizer_that_is_none_is_refused(damaged: Callable[[str, bytes], str], name: str, content: bytes) -> None:
    assert "damaged" in damaged(name, content)


TEMPLATES = {
    "nested loops": ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "took too long"),
    "loops over tools alone": (
        "{% if tools %}{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}{% endif %}a",
        "took too long",
    ),
    "a power": ("{{ 9 ** (9 ** 9) }}", "took too long"),
    "ten billion letters": ("{{ 'x' * 10**10 }}", "GiB of memory"),
    "letters that are never written": (
        "{% if messages | length > 90 %}{{ 'x' * 10**10 }}{% endif %}a",
        "GiB of memory",
    ),
    "padding": ("{{ 'x' | center(10**10) }}", "GiB of memory"),
    "doubling": (
        "{% set n = namespace(x='x' * 99) %}{% for i in range(40) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
        "GiB of memory",
    ),
    "a range": ("{% for a in range(10**9) %}{% endfor %}", "Range too big"),
    "a macro in itself": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
    "an include": ("{% include 'x' %}", "no loader"),
    "syntax": ("{% for %}", "refuses the messages"),
    "1 MB": ("x" * 1_000_000, "at most 262144 are taken"),
    "a text of 100 MB": ("{% for a in range(50000) %}" + "x" * 2000 + "{% endfor %}", "at most 16777216 are taken"),
    "tags of a long text": ("{{ ('<' * 300000) | striptags }}", "striptags"),
    "tags of a long text, in some conversations": (
        "{% if '=' in messages[0].content %}{{ messages[0].content | striptags }}{% endif %}a",
        "striptags",
    ),
    "links of a long text": ("{{ ('a.b@c ' * 300000) | urlize }}", "urlize"),
    "lines of a long text": ("{{ (' ' * 300000) | wordwrap(5) }}", "wordwrap"),
    "a filter by its name": ("{{ ['<' * 300000] | map('strip' ~ 'tags') | list }}", "striptags"),
    "a way out": ("{{ cycler.__init__.__globals__ }}", "unsafe"),
}


@pytest.mark.parametrize("kind", TEMPLATES)
def test_a_chat_template_has_limits_of_time_and_size(
    damaged: Callable[[str, bytes], str], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    template, reason = TEMPLATES[kind]
    if reason == "took too long":  # What fills memory may need longer for that than this.
        monkeypatch.setattr(chat, "RENDER_S", 0.5)
    assert reason in damaged("chat_template.jinja", template.encode())


def test_a_template_that_takes_long_for_some_messages_ends_with_their_place(
    workshop: Workshop, damaged: Callable[[str, bytes], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat, "RENDER_S", 0.5)
    slow = (
        "{% if '=' in messages[0].content %}{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% "
        "endfor %}{% endif %}a"
    )
    assert re.search(r"line 1: .*chat template .*0.5 s", damaged("chat_template.jinja", slow.encode()))


def record(answer: str) -> str:
    return f'{{"prompt": "1+1=", "answer": {answer}}}\n'


LINES: dict[str, tuple[str | bytes, str]] = {
    "970 levels": (record("[" * 970 + "]" * 970), "nested more than 64 levels"),
    "10,000 levels": (record('{"a":' * 10_000 + "1" + "}" * 10_000), "nested more than 64 levels"),
    "a million brackets": (record("[" * 1_000_000), "nested more than 64 levels"),
    "40 MB": (record('"' + "x" * 40_000_000 + '"'), "at most 33554432 are read"),
    "40 MB of blanks": (" " * 40_000_000 + "\n", "at most 33554432 are read"),
    "infinity": (record("1e999"), "beyond the numbers of double precision"),
    "NaN": (record("NaN"), "NaN is not a JSON value"),
    "5,000 digits": (record("9" * 5000), "is not JSON"),
    "Latin-1": (record('"\xe9"').encode("latin-1"), "is not UTF-8"),
    "zeros": (b"\0" * 100 + b"\n", "is not JSON"),
}


@pytest.mark.parametrize("kind", LINES)
@pytest.mark.parametrize("suffix", [".jsonl", ".json"])
def test_a_hostile_line_of_data_is_refused_with_its_place(tmp_path: Path, suffix: str, kind: str) -> None:
    content, reason = LINES[kind]
    path = tmp_path / f"data{suffix}"
    path.write_bytes(record('"2"').encode() + (content if isinstance(content, bytes) else content.encode()))
    message = refusal(lambda: list(Reading(SourceConfig(path=path))))
    assert message.startswith(f"{path}, {'line' if suffix == '.jsonl' else 'row'} 2 is ") and reason in message


def test_a_json_file_that_is_a_deep_list_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "data.json"
    for depth in (70, 970, 10_000):
        path.write_text("[" * depth + "]" * depth)
        said = refusal(lambda: list(Reading(SourceConfig(path=path))))
        assert re.search(rf"{path} is not JSON: .*64 levels", said)


def test_hostile_parquet_is_refused_with_its_place(tmp_path: Path) -> None:
    path = tmp_path / "data.parquet"

    def fault() -> str:
        return refusal(lambda: list(Reading(SourceConfig(path=path))))

    value: Any = 1
    for _ in range(80):
        value = [value]
    pq.write_table(pa.table({"prompt": ["a"], "answer": [value]}), path)
    assert str(path) in fault()
    pq.write_table(pa.table({"prompt": ["a", "x" * 40_000_000]}), path)
    assert re.search(rf"{path}, row 2: column 'prompt' .*33554432", fault())
    for content in (b"", b"PAR1" + b"x" * 100 + b"PAR1", b"PAR1" + b"\xff" * 1000):
        path.write_bytes(content)
        assert f"{path} is not a readable parquet" in fault()


@pytest.mark.parametrize(
    "name", ["tokenizer.json", "model.safetensors", "generation_config.json", "chat_template.jinja"]
)
def test_a_pipe_in_a_models_folder_is_named_and_not_read(workshop: Workshop, name: str) -> None:
    folder = shutil.copytree(workshop.model, workshop.folder / "piped")
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    with pytest.raises(UserError, match=f"{name} is a pipe or a device"):
        check_first(workshop.config(model=str(folder)))
