"""The configuration of a run: its sections as typed models, and how it is read."""

from braidrl.config.reading import apply_override, load_config, parse_config
from braidrl.config.sections import (
    ClusterConfig,
    Config,
    DataConfig,
    EvaluationConfig,
    PlacementConfig,
    PoolConfig,
    RewardConfig,
    SourceConfig,
    StreamingConfig,
    TrainerConfig,
    VerifierConfig,
)

__all__ = [
    "ClusterConfig",
    "Config",
    "DataConfig",
    "EvaluationConfig",
    "PlacementConfig",
    "PoolConfig",
    "RewardConfig",
    "SourceConfig",
    "StreamingConfig",
    "TrainerConfig",
    "VerifierConfig",
    "apply_override",
    "load_config",
    "parse_config",
]
