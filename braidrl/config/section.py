"""The base class of every section of the configuration, common types and limits."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

DType = Literal["float32", "bfloat16", "float64"]
NotEmpty = Annotated[str, Field(min_length=1)]
"""A text of at least one character."""
ONE_OR_MORE = BeforeValidator(lambda value: value if value is None or isinstance(value, list) else [value])
"""Validator that accepts one value for a list of one."""

MOST_S = 1e6
"""Maximum of a time limit in seconds: system calls accept at most some weeks."""
MOST_PROCESSES = 65_536
MOST_ROWS = 1 << 24
MOST_PIXELS = 1 << 32
MOST_TOKENS = 1 << 27
MOST_STEPS = 1 << 40
NAME_BYTES = 200
"""Maximum length of a name: a file name may have 255 bytes, and some files add a suffix."""


def check_name(name: str) -> str:
    """Return the name. Raises ValueError if it is not a valid file name or leads out of a folder."""
    if not name.isprintable() or name != name.strip() or "/" in name or "\\" in name or name.startswith("."):
        raise ValueError("a name has neither slashes nor control characters, and does not begin with a dot or a blank")
    if not 1 <= len(name.encode(errors="replace")) <= NAME_BYTES:
        raise ValueError(f"a name has 1 to {NAME_BYTES} bytes")
    return name


Name = Annotated[str, AfterValidator(check_name)]
"""Name of a file or folder."""


class Section(BaseModel):
    """A section of the configuration; unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=(), allow_inf_nan=False)
    short_for: ClassVar[Mapping[type, str]] = {}
    """The key that is set if a value of a type is given in place of the section."""

    @model_validator(mode="before")
    @classmethod
    def _in_full(cls, value: Any) -> Any:
        key = next((key for kind, key in cls.short_for.items() if isinstance(value, kind)), None)
        return value if key is None else {key: value}


class SandboxConfig(Section):
    """Limits of user code: a call of a verifier, or a trajectory's environment."""

    sandbox: Literal["process", "bubblewrap", "none"] = "process"
    """Isolation of your own code. `process`: processes that cannot access the run, and end with the call or the
    trajectory. `bubblewrap`: additionally without network and without files other than its own. `none`: no isolation.
    """
    memory_gib: float = Field(4.0, gt=0, le=1 << 20)
    """GiB of address space of each process in the sandbox, and of memory of all of them together, with shared memory
    and files in /tmp.
    """
    max_processes: int = Field(64, ge=1, le=MOST_PROCESSES)
    """Maximum number of concurrent processes in the sandbox; threads are limited to sixteen times this.

    Code that exceeds it is killed.
    """
    run_programs_without_walls: bool = False
    """Run programs written by a model even without the full isolation of `bubblewrap`."""
