"""A run from its start to its end, over all processes that are lost on the way.

train ─▶ TrainingRun ──a process is lost──▶ again, from the newest complete checkpoint, within trainer.max_restarts
"""

from pathlib import Path
from typing import Any

from braidrl.cluster.ranks import tell
from braidrl.cluster.row_deaths import RowDeaths
from braidrl.cluster.world import World
from braidrl.config import Config, parse_config
from braidrl.engines.deployment import MODES
from braidrl.errors import LostProcess
from braidrl.runtimes.prepare.fetching import with_fetched
from braidrl.runtimes.run import TrainingRun, repair_budget
from braidrl.runtimes.saving.folders import unused_folder
from braidrl.runtimes.spmd.launch import in_ranks


def train(config: Config, **options: Any) -> Path:
    """Run a configuration to its end, as `braid train` does, and return the run's folder; `options` are arguments of
    `TrainingRun`.

    Raises LostProcess if processes were lost more often within an hour than `trainer.max_restarts` allows.
    """
    config = with_fetched(config)
    repairs, deaths, folder = repair_budget(config), RowDeaths(), options.get("resume")
    if repairs.per_hour and not folder:
        folder = config.output / config.name if config.name else unused_folder(config)
        config = config.model_copy(update={"name": folder.name})
    while True:
        try:
            if MODES[config.runtime].chained:
                return Path(in_ranks(config, "braidrl.runtimes.restarts:train_rank", options, repairs, deaths))
            with TrainingRun(config, **options, repairs=repairs, deaths=deaths) as run:
                run.train()
            return run.folder
        except LostProcess as error:
            if not error.is_counted and not repairs.spend():
                raise LostProcess(f"{error}{deaths.frequent()}") from error
            tell(f"{error}; the run starts again by itself ({repairs})")
            options |= {"resume": folder, "newest_whole": True}


def train_rank(world: World, task: dict[str, Any]) -> str:
    options: dict[str, Any] = {n: Path(v) if n in ("resume", "replay") and v else v for n, v in task["options"].items()}
    with TrainingRun(parse_config(task["config"]), **options, world=world) as run:
        run.train()
    return str(run.folder)
