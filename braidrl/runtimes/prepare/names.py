"""Checks of the names in a configuration: engines, placements, optimizers, verifiers, trackers. torch is not loaded."""

import importlib.util

from braidrl.cluster.pools import NAMES as PLACEMENTS
from braidrl.config import Config
from braidrl.config.section import SandboxConfig
from braidrl.engines.engine import ENGINES
from braidrl.engines.http.dialects import DIALECTS, vllm_log_prob_modes
from braidrl.engines.requests import training_sampling
from braidrl.errors import UserError, suggest
from braidrl.observe.trackers import TRACKERS
from braidrl.rewards.pool import check_requirements
from braidrl.rewards.verifier import resolve
from braidrl.rewards.verifiers import VERIFIERS
from braidrl.sandbox.hosts import check_walls
from braidrl.training.names import BACKENDS, OPTIMIZERS


def check_names(config: Config) -> None:
    """Raise UserError for a configured name that does not exist, under any runtime."""
    engine, placement = config.rollout.engine, config.placement.name
    check_engine(config)
    for key, sandbox, _ in user_code(config):
        check_walls(key, sandbox)
    if placement not in PLACEMENTS:
        raise UserError(f"no placement is called {placement!r}. {suggest(placement, PLACEMENTS)}")
    if config.rollout.engine_settings and engine in ENGINES:
        raise UserError(f"rollout.engine_settings are for your own engine, and rollout.engine is {engine}; remove them")
    OPTIMIZERS.check(config.trainer.optimizer)
    for backend in {config.trainer.backend, *(role.backend for role in config.roles.values() if role.backend)}:
        BACKENDS.check(backend)
    sources = [*config.data.training_sources, *config.data.evaluation_sources.values()]
    for verifier in [*config.reward.verify, *(named for source in sources for named in source.verify or ())]:
        check_requirements(verifier.name, verifier.params, config.reward)
        resolve(verifier.name, verifier.params)
    for tracker in config.trackers:
        TRACKERS.check_settings(tracker.name, tracker.params)
        TRACKERS.check(tracker.name, settings=tracker.params)
        # A built-in tracker has the name of its package.
        if tracker.name in TRACKERS and importlib.util.find_spec(tracker.name) is None:
            raise UserError(f"trackers={tracker.name} is not installed; write pip install 'braidrl[{tracker.name}]'")


def check_engine(config: Config) -> None:
    """Raise UserError for an unknown engine, and for server or sampling settings that contradict other settings."""
    rollout = config.rollout
    engine, servers = rollout.engine, rollout.servers
    # Another interpreter may have packages that this one lacks.
    ENGINES.check(engine, load=rollout.python is None)
    if servers.dialect not in DIALECTS:
        raise UserError(
            f"rollout.servers.dialect: there is none called {servers.dialect!r}. {suggest(servers.dialect, DIALECTS)}"
        )
    if engine != "http" and servers.urls:
        raise UserError(f"rollout.servers are asked with rollout.engine=http, and rollout.engine is {engine}")
    if engine == "http":
        if not servers.urls:
            raise UserError("rollout.engine=http asks servers; name them, as in rollout.servers=http://127.0.0.1:8000")
        if rollout.engines is not None:
            raise UserError("rollout.engines are processes, and rollout.engine=http asks servers; remove it")
        if servers.folder is not None and not servers.folder.is_dir():
            raise UserError(f"rollout.servers.folder: there is no folder {servers.folder}")
        if servers.weights == "network" and DIALECTS[servers.dialect].receive is None:
            raise UserError(f"rollout.servers.weights=network: {servers.dialect} reads a folder; remove it")
        if importlib.util.find_spec("aiohttp") is None:
            raise UserError("rollout.engine=http needs aiohttp; install it with `pip install 'braidrl[endpoint]'`")
    if engine != "vllm" and (engine != "http" or servers.dialect != "vllm"):
        return
    if rollout.is_reproducible and rollout.vllm.get("async_scheduling"):
        raise UserError(
            "rollout.vllm.async_scheduling=true draws a token before the one before it is known, and "
            "rollout.reproducible=true counts them; remove one of the two"
        )
    if not rollout.is_reproducible and not vllm_log_prob_modes(training_sampling(config)):
        raise UserError(
            f"rollout.reproducible=false: vLLM gives log-probs of temperature {rollout.temperature:g} of the tokens "
            "alone that top_p and "
            "top_k keep; write rollout.temperature=1, remove top_p and top_k, or write rollout.reproducible=true"
        )


def user_code(config: Config) -> list[tuple[str, SandboxConfig, str]]:
    """Return the sandboxes of user code: the section's name, the section, and a description of the code."""
    environment = config.rollout.environment
    verifiers = [verifier.name for verifier in config.reward.verify if verifier.name not in VERIFIERS]
    sections: list[tuple[str, SandboxConfig, str]] = [("reward", config.reward, name) for name in verifiers[:1]]
    return [*sections, *([("rollout.environment", environment, environment.name)] if environment.name else [])]
