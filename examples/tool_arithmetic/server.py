"""The calculator as a server of the Model Context Protocol over stdin and stdout: `python
examples/tool_arithmetic/server.py`.
"""

from __future__ import annotations

from mcp.server.mcpserver import MCPServer

server = MCPServer("calculator")


@server.tool()
def add(a: int, b: int) -> int:
    """Return the sum of two numbers."""
    return a + b


@server.tool()
def multiply(a: int, b: int) -> int:
    """Return the product of two numbers."""
    return a * b


if __name__ == "__main__":
    server.run()
