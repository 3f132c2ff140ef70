"""A resource server of NeMo Gym, `equivalence_rule`, with questions of sums: it scores an answer by exact comparison.

python examples/tool_arithmetic/nemo_gym_server.py 8001 build/tool_arithmetic/nemo_gym.jsonl
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import uvicorn
from nemo_gym.config_types import BaseServerConfig
from nemo_gym.server_utils import ServerClient
from omegaconf import OmegaConf
from resources_servers.equivalence_rule.app import EquivalenceRuleResourcesServer, EquivalenceRuleResourcesServerConfig

HOST = "127.0.0.1"


def question(source: random.Random) -> dict[str, object]:
    """Return a row of a data set of NeMo Gym: a request of OpenAI's responses, and what the server compares."""
    a, b = source.randrange(10), source.randrange(10)
    asked = [{"role": "user", "content": f"what is {a} plus {b}"}]
    return {"responses_create_params": {"input": asked}, "expected_answer": str(a + b)}


def main(port: int, file: Path, count: int = 64) -> None:
    source = random.Random(0)
    file.write_text("".join(json.dumps(question(source)) + "\n" for _ in range(count)))
    server = EquivalenceRuleResourcesServer(
        config=EquivalenceRuleResourcesServerConfig(host=HOST, port=port, entrypoint="app.py"),
        server_client=ServerClient(
            head_server_config=BaseServerConfig(host=HOST, port=11000), global_config_dict=OmegaConf.create({})
        ),
    )
    uvicorn.run(server.setup_webserver(), host=HOST, port=port, log_level="warning")


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
