"""The base of every part of the configuration, and what parts have in common."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

DType = Literal["float32", "bfloat16", "float64"]
NotEmpty = Annotated[str, Field(min_length=1)]
"""A text of at least one character."""
ONE_OR_MORE = BeforeValidator(lambda value: value if value is None or isinstance(value, list) else [value])
"""By which one value is short for a list of it."""

MOST_S = 1e6
"""Seconds of a time limit: the system's own calls take no more than some weeks."""
MOST_PROCESSES = 65_536
MOST_ROWS = 1 << 24
MOST_TOKENS = 1 << 27
MOST_STEPS = 1 << 40
NAME_BYTES = 200
"""A file's name may have 255 bytes, and beside it there are others with some more."""


def check_name(name: str) -> str:
    """Return the name. Raises ValueError for one that would be no file's name, or would lead out of a folder."""
    if not name.isprintable() or name != name.strip() or "/" in name or "\\" in name or name.startswith("."):
        raise ValueError("a name has neither slashes nor control characters, and does not begin with a dot or a blank")
    if not 1 <= len(name.encode(errors="replace")) <= NAME_BYTES:
        raise ValueError(f"a name has 1 to {NAME_BYTES} bytes")
    return name


Name = Annotated[str, AfterValidator(check_name)]
"""Names a file or folder."""


class Section(BaseModel):
    """A part of the configuration; refuses keys that it does not have."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=(), allow_inf_nan=False)
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
    memory_gib: float = Field(4.0, gt=0, le=1 << 20)
    """Address space of each of its processes in the sandbox, and memory of all of them, shared memory and files in /tmp included."""
    max_processes: int = Field(64, ge=1, le=MOST_PROCESSES)
    """How many processes it may have at a time in the sandbox, and sixteen times as many threads; code that starts more is ended."""
    run_programs_without_walls: bool = False
    """Run programs that a model wrote also where they have not all walls of `bubblewrap`."""
