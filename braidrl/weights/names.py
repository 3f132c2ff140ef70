"""The weight transports by name. A configuration names them before torch is loaded."""

from braidrl.importing import PluginRegistry

TRANSPORTS = PluginRegistry(
    "weight transport",
    {"collective": "braidrl.weights.transfer:GroupTransport"},
    arguments=("ranks", "device"),
    methods=("exchange", "close"),
)
"""The ways in which the collective publisher moves bytes between processes."""
