"""The calculator as a server of the Model Context Protocol: `python examples/tool_arithmetic/server.py` speaks over input and output."""

from __future__ import annotations

from mcp.server.mcpserver import MCPServer

server = MCPServer("calculator")


@server.tool()
def add(a: int, b: int) -> int:
    """The sum of two numbers."""
    return a + b


@server.tool()
def multiply(a: int, b: int) -> int:
    """The product of two numbers."""
    return a * b


if __name__ == "__main__":
    server.run()
