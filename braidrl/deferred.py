"""torch, imported at the first use of one of its names: it takes seconds, and a mistake in a configuration should not.

    from braidrl.deferred import Tensor, torch      in place of   import torch; from torch import Tensor

The modules that a command needs to check a flow and its data write so.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch as torch
    from torch import Tensor as Tensor
else:

    class Torch:
        """The names of torch; each is kept once it was read."""

        def __getattr__(self, name: str) -> Any:
            import torch

            value = getattr(torch, name)
            setattr(self, name, value)
            return value

    class OfTensors(type):
        def __instancecheck__(cls, value: Any) -> bool:
            return isinstance(value, torch.Tensor)

        def __subclasscheck__(cls, kind: type) -> bool:
            return issubclass(kind, torch.Tensor)

    class Tensor(metaclass=OfTensors):
        """`torch.Tensor` in annotations, `isinstance` and `issubclass`."""

    torch = Torch()
