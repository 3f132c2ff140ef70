"""Write a run to the named trackers through their libraries, continue as a resumed run does, and print their
content.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from braidrl.config import TrackerConfig
from braidrl.observe.trackers import TrackedRun, Trackers

METRIC = "eval/held out/avg@8"
Found = dict[str, Any]


def write(folder: Path, names: list[str]) -> None:
    """Write steps 1 and 2, then step 3 of a resumed run, to all trackers at once; any message from them is an error."""
    report = folder / "report.html"
    report.write_text("a report")
    chosen = [TrackerConfig(name=name, samples_every=3) for name in names]
    for resume_step, steps in ((None, (1, 2)), (2, (3,))):
        config = {"flow": "grpo", "trainer": {"steps": 3}}
        trackers = Trackers(chosen, TrackedRun(folder, config, resume_step), sys.exit)
        for step in steps:
            sample = {"step": step, "prompt": "2+2=", "response": "vier | four", "score": 0.5, "answer": None}
            trackers.write(step, {METRIC: step / 2})
            trackers.write_samples(step, lambda sample=sample: [sample])
        trackers.write_report(report)
        trackers.close()


def read_mlflow(folder: Path) -> Found:
    import mlflow

    client = mlflow.MlflowClient()
    (run,) = client.search_runs([client.get_experiment_by_name("braid").experiment_id])
    place, history = Path(client.download_artifacts(run.info.run_id, "")), "eval/held out/avg_at_8"
    table = json.loads((place / "samples.json").read_text())
    return {
        "points": [(point.step, point.value) for point in client.get_metric_history(run.info.run_id, history)],
        "flow": run.data.params["flow"],
        "responses": [row[table["columns"].index("response")] for row in table["data"]],
        "report": (place / "report.html").read_text(),
    }


def read_trackio(folder: Path) -> Found:
    import trackio
    from trackio.sqlite_storage import SQLiteStorage

    logs = SQLiteStorage.get_logs("braid", folder.name)
    (run,) = trackio.Api().runs("braid")
    tables = [log["samples"]["_value"] for log in logs if "samples" in log]
    reports = [path.read_text() for path in (folder / "trackio").rglob("blobs/*/*/*")]
    return {
        "points": [(log["step"], log[METRIC]) for log in logs if METRIC in log],
        "flow": run.config["flow"],
        "responses": [row["response"] for table in tables for row in table],
        "report": reports[0],
    }


def records(reader: Any, path: Path, record: type[Any]) -> Iterator[Any]:
    reader.open(path)
    while (line := reader.scan()) is not None:
        yield record.FromString(line)


def read_wandb(folder: Path) -> Found:
    from swanlab.converter.wb.wbdatastore import WBDataStoreReader
    from wandb.proto.wandb_internal_pb2 import Record

    result: Found = {"points": [], "responses": [], "report": ""}
    # Offline, each part of a resumed run has its own file; wandb joins them by the run's id.
    for path in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        for record in records(WBDataStoreReader(), path, Record):
            items = {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
            if METRIC in items:
                result["points"].append((items.get("_step", record.history.step.num), items[METRIC]))
            if "samples/path" in items:
                table = json.loads((path.parent / "files" / items["samples/path"]).read_text())
                result["responses"] += [row[table["columns"].index("response")] for row in table["data"]]
            if record.run.run_id:
                config = {each.key: each.value_json for each in record.run.config.update}
                result["flow"] = json.loads(config["flow"])
            for content in record.artifact.manifest.contents if record.artifact.type == "report" else ():
                result["report"] = Path(content.local_path).read_text()
    return result


def read_swanlab(folder: Path) -> Found:
    import yaml
    from swanlab.proto.swanlab.record.v1.record_pb2 import Record
    from swanlab.sdk.internal.core_python.store import DataStoreReader

    result: Found = {"points": [], "responses": [], "report": ""}
    for path in sorted(folder.glob("swanlab/run-*/*.swanlab")):
        for record in records(DataStoreReader(), path, Record):
            if record.HasField("scalar") and record.scalar.key == METRIC:
                result["points"].append((record.scalar.step, record.scalar.value.number))
            for item in record.media.value.items if record.HasField("media") else ():
                table = json.loads((path.parent / "media" / "echarts" / item.filename).read_text())
                result["responses"] += [row["response"] for row in table["rowData"]]
            if record.HasField("save") and record.save.name == "report.html":
                result["report"] = Path(record.save.target_path).read_text()
        result["flow"] = yaml.safe_load((path.parent / "files" / "config.yaml").read_text())["flow"]["value"]
    return result


READERS: dict[str, Callable[[Path], Found]] = {
    "mlflow": read_mlflow,
    "trackio": read_trackio,
    "wandb": read_wandb,
    "swanlab": read_swanlab,
}


def main(place: str, *names: str) -> None:
    folder = Path(place)
    folder.mkdir()
    os.environ |= {
        "WANDB_MODE": "offline",
        "SWANLAB_MODE": "offline",
        "TRACKIO_DIR": f"{folder}/trackio",
        "WANDB_DATA_DIR": f"{folder}",
        "WANDB_CACHE_DIR": f"{folder}",
        "MLFLOW_TRACKING_URI": f"sqlite:///{folder}/mlflow.db",
    }
    os.chdir(folder)  # Here MLflow keeps files without a server.
    write(folder, list(names))
    (folder / "found.json").write_text(json.dumps({name: READERS[name](folder) for name in names}))


if __name__ == "__main__":
    main(*sys.argv[1:])
