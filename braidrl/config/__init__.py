"""The configuration of a run: its sections as typed models, and how it is read."""

from braidrl.config.config import ClusterConfig, Config, PlacementConfig, PoolConfig, StreamingConfig, TrackerConfig
from braidrl.config.data import CurriculumConfig, DataConfig, ImagesConfig, RewardConfig, SourceConfig, VerifierConfig
from braidrl.config.environment import EnvironmentConfig
from braidrl.config.reading import apply_override, load_config, parse_config
from braidrl.config.training import BalanceConfig, EvaluationConfig, LoraConfig, RoleConfig, TrainerConfig

__all__ = [
    "BalanceConfig",
    "ClusterConfig",
    "Config",
    "CurriculumConfig",
    "DataConfig",
    "EnvironmentConfig",
    "EvaluationConfig",
    "ImagesConfig",
    "LoraConfig",
    "PlacementConfig",
    "PoolConfig",
    "RewardConfig",
    "RoleConfig",
    "SourceConfig",
    "StreamingConfig",
    "TrackerConfig",
    "TrainerConfig",
    "VerifierConfig",
    "apply_override",
    "load_config",
    "parse_config",
]
