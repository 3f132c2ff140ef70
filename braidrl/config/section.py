"""The base of every part of the configuration."""

from typing import Literal

from pydantic import BaseModel, ConfigDict

DType = Literal["float32", "bfloat16", "float64"]


class Section(BaseModel):
    """A part of the configuration; refuses keys that it does not have."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, protected_namespaces=())
