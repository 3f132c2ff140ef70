"""The environment of multi-turn trajectories: `rollout.environment`."""

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from braidrl.config.section import MOST_PROCESSES, MOST_ROWS, MOST_S, SandboxConfig

LIBRARIES = ("agent", "gem", "harbor", "mcp", "openenv", "textarena", "verifiers")
"""Keys of `rollout.environment` that name an environment of a library, or an agent."""


class EnvironmentConfig(SandboxConfig):
    """The environment of multi-turn trajectories."""

    short_for = {str: "name"}
    name: str | None = None
    """`module:Class`, `module:function`, `gem:name`, `harbor:folder`, `mcp:server`, `openenv:address`,
    `textarena:name`, `verifiers:name` or `agent:module:function`, for generate stages that do not name one. It gives
    the score and the reward; the flow's `verify` is then omitted. `{gem: name}` is the same as `{name: "gem:name"}`,
    and so for each library and `agent`.
    """
    params: dict[str, Any] = {}
    """Keyword arguments for it."""
    at_once: int = Field(64, ge=1, le=MOST_PROCESSES)
    """Maximum number of concurrent trajectories in the whole run. Each rank has an equal share; if there are more
    ranks, they play in turn.
    """
    timeout_s: float = Field(60.0, gt=0, le=MOST_S)
    """Seconds for one answer of the environment, or an agent's whole trajectory, which otherwise ends and is counted as
    failed.
    """
    episode_timeout_s: float | None = Field(None, gt=0, le=MOST_S)
    """Seconds for all turns of a trajectory of an environment, those of the model included; after a turn that ends
    later it is counted as failed. The whole trajectory of an agent is limited by `timeout_s`.
    """
    resume: Literal["replay", "end"] | None = None
    """What becomes of an episode whose `rollout.tokens_per_iteration` are spent. `replay` suspends it, and plays its
    recorded actions again in a new environment, which must answer them as before: one that does not is counted as
    failed. `end` counts it as failed at once, for environments that cannot be played again.
    """
    retries: int = Field(0, ge=0, le=100)
    """A trajectory that failed is played again from its start, at most this number of times, in a new environment."""
    max_turns: int = Field(16, ge=1, le=MOST_ROWS)
    """Maximum number of turns in one trajectory, or with several `policies` of all of them in an episode."""
    variables: list[str] = []
    """Environment variables that it receives from the run, in addition to PATH and the like."""
    host: str = "127.0.0.1"
    """The address of this machine on which an agent's endpoint listens.

    An address that other machines can reach needs a key.
    """
    key_variable: str | None = None
    """Environment variable with the endpoint's key: clients send it as their API key, an agent has it as `api_key` in
    its example.
    """
    spans: str | None = None
    """A folder to which each process writes the spans of its episodes by OpenTelemetry, as JSON lines; or `otlp`: to
    the service that OTEL_EXPORTER_OTLP_ENDPOINT names.
    """
    tool_format: (
        Literal["hermes", "qwen_xml", "llama", "mistral", "deepseek", "glm", "harmony", "kimi", "listed"] | None
    ) = None
    """Format of the model's tool calls; by default found from its tokenizer's chat template."""
    python: Path | None = None
    """Python interpreter of its processes, if its library is installed in another virtual environment; by default
    Braid's.
    """

    @model_validator(mode="before")
    @classmethod
    def _by_library(cls, value: Any) -> Any:
        """Read `{library: name}` as `{name: library:name}`."""
        named = [key for key in LIBRARIES if key in value] if isinstance(value, dict) else []
        if not named:
            return value
        if len(named) > 1 or value.get("name") is not None:
            keys = " and ".join([*named, *(["name"] if value.get("name") is not None else [])])
            raise ValueError(f"{keys} each name an environment; keep one")
        parameters = {key: setting for key, setting in value.items() if key not in (*named, "name")}
        return {**parameters, "name": f"{named[0]}:{value[named[0]]}"}

    @model_validator(mode="after")
    def _fits_the_sandbox(self) -> "EnvironmentConfig":
        if self.episode_timeout_s is not None and (self.name or "").startswith(("agent:", "harbor:", "verifiers:")):
            raise ValueError(
                "timeout_s limits the whole trajectory of an agent; write it in place of episode_timeout_s"
            )
        in_walls = self.sandbox == "bubblewrap" or self.params.get("environment")
        if (self.name or "").startswith("harbor:") and not in_walls:
            raise ValueError(
                "tasks of harbor work in folders such as /app, which only sandbox=bubblewrap makes; write it, or name "
                "one of harbor's environments in params.environment"
            )
        if self.python is not None and self.sandbox == "none":
            raise ValueError("python is the interpreter of processes, which sandbox=none does not have; remove one")
        if self.host != "127.0.0.1" and self.sandbox == "bubblewrap":
            raise ValueError("host is an address of this machine, which sandbox=bubblewrap does not reach; remove one")
        return self
