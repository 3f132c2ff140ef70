"""Settings that a runtime does not look at are expected of, and hinder nobody."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from braidrl.config import parse_config
from braidrl.runtimes.prepare.checks import lacking, without_effect
from tests.tiny import Workshop


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        ({"streaming": {"dispatch_rows": 4}}, ["streaming.* has no effect: runtime=eager does not stream"]),
        ({"placement": "split"}, ["placement has no effect: only runtime=hybrid has pools, and this is runtime=eager"]),
        ({"workers": 2}, ["workers=2 has no effect: runtime=eager is this one process"]),
        ({"runtime": "streaming", "workers": 2}, ["workers=2 has no effect: the processes of runtime=streaming are"]),
        ({"cluster": {"launcher": "ray"}}, ["cluster.launcher=ray has no effect: only runtime=distributed has ranks"]),
        ({"trainer": {"max_staleness": 1}}, ["trainer.max_staleness=1 makes no row stale"]),
        ({"trainer": {"max_staleness": 1, "surplus": "keep"}}, []),
        ({"runtime": "streaming", "trainer": {"max_staleness": 1}}, []),
        ({"runtime": "hybrid", "workers": 2}, []),
        ({"runtime": "distributed", "workers": 2, "cluster": {"launcher": "local"}}, []),
        ({}, []),
    ],
)
def test_a_setting_that_a_runtime_does_not_use_is_named_in_a_line(
    workshop: Workshop, sections: dict[str, Any], expected: list[str]
) -> None:
    lines = without_effect(parse_config(workshop.tree(**sections)))
    assert [line.startswith(words) for line, words in zip(lines, expected, strict=True)] == [True] * len(expected)


def test_a_tracker_without_a_login_is_said_in_a_line(
    workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL", "WANDB_IDENTITY_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    config = parse_config(workshop.tree(trackers=["tensorboard", "wandb"]))
    (line,) = lacking(config)
    assert line.startswith(
        "trackers=wandb: there is no login for api.wandb.ai; run `wandb login`, set WANDB_API_KEY, or"
    )
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password secret\n")
    assert lacking(config) == []
    monkeypatch.setenv("WANDB_BASE_URL", "https://metrics.example.org:8080")
    assert "no login for metrics.example.org" in lacking(config)[0]
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert lacking(config) == []


def test_swanlab_without_a_login_is_said_in_a_line(
    workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("SWANLAB_API_KEY", "SWANLAB_MODE", "SWANLAB_API_HOST", "SWANLAB_SAVE_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SWANLAB_ROOT", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    config = parse_config(workshop.tree(trackers=["swanlab"]))
    assert lacking(config) == [
        "trackers=swanlab: there is no login for api.swanlab.cn; run `swanlab login`, set SWANLAB_API_KEY, or write "
        "SWANLAB_MODE=offline to keep its files here"
    ]
    (tmp_path / ".netrc").write_text("machine https://api.swanlab.cn login https://swanlab.cn password secret\n")
    assert lacking(config) == []
    monkeypatch.setenv("SWANLAB_API_HOST", "https://metrics.example.org")
    assert "no login for metrics.example.org" in lacking(config)[0]
    (tmp_path / "config.yaml").write_text("api_key: secret\n")
    assert lacking(config) == []
    (tmp_path / "config.yaml").unlink()
    assert lacking(parse_config(workshop.tree(trackers=[{"name": "swanlab", "params": {"mode": "local"}}]))) == []


class Guarded(BaseHTTPRequestHandler):
    """A server that knows one user, as MLflow's does."""

    def do_GET(self) -> None:
        self.send_response(200 if self.headers.get("Authorization") == "Basic bWU6c2VjcmV0" else 401)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Say nothing."""


def test_a_server_of_mlflow_that_does_not_answer_or_refuses_is_said_in_a_line(
    workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("USERNAME", "PASSWORD", "TOKEN", "AUTH", "AWS_SIGV4"):
        monkeypatch.delenv(f"MLFLOW_TRACKING_{name}", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("HOME", str(tmp_path))
    config = parse_config(workshop.tree(trackers=["mlflow"]))
    with ThreadingHTTPServer(("127.0.0.1", 0), Guarded) as server:
        uri = f"http://127.0.0.1:{server.server_port}"
        monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        (line,) = lacking(config)
        assert line.startswith(f"trackers=mlflow: {uri} refuses this login (401); set MLFLOW_TRACKING_USERNAME and")
        monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "me")
        monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "secret")
        assert lacking(config) == []
        server.shutdown()
        serving.join()
    (line,) = lacking(config)
    assert line.startswith(f"trackers=mlflow: nothing answers at {uri} (") and "start `mlflow server` there, or" in line
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    assert lacking(config) == []


def test_a_run_says_so_before_its_first_step(workshop: Workshop, capfd: pytest.CaptureFixture[str]) -> None:
    workshop.run(workers=2, trainer={"steps": 1})
    said = capfd.readouterr().err
    assert "workers=2 has no effect" in said[: said.index("step 1")]
