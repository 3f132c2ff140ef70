"""The base of every part of the configuration, and what parts have in common."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

DType = Literal["float32", "bfloat16", "float64"]
NotEmpty = Annotated[str, Field(min_length=1)]
"""A text of at least one character."""
ONE_OR_MORE = BeforeValidator(lambda value: value if value is None or isinstance(value, list) else [value])
"""By which one value is short for a list of it."""


class Section(BaseModel):
    """A part of the configuration; refuses keys that it does not have."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())
    short_for: ClassVar[Mapping[type, str]] = {}
    """The key that a bare value of a type is short for, with nothing else set."""

    @model_validator(mode="before")
    @classmethod
    def _in_full(cls, value: Any) -> Any:
        key = next((key for kind, key in cls.short_for.items() if isinstance(value, kind)), None)
        return value if key is None else {key: value}


class SandboxConfig(Section):
    """What code of a user's own may reach and take, a call of a verifier or a trajectory's environment."""

    sandbox: Literal["process", "bubblewrap", "none"] = "process"
    """Where code of your own runs: `process`, in processes that cannot reach the run, write nothing that it trusts, and end with the call
    or the trajectory; `bubblewrap`, which also has no network and sees no files but its own; or `none`, without walls."""
    memory_gib: float = Field(4.0, gt=0)
    """Address space of each of its processes in the sandbox, and memory of all of them, shared memory and files in /tmp included."""
    max_processes: int = Field(64, ge=1)
    """How many processes it may have at a time in the sandbox, and sixteen times as many threads; code that starts more is ended."""
    run_programs_without_walls: bool = False
    """Run programs that a model wrote also where they have not all walls of `bubblewrap`."""
