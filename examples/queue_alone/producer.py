"""Draw samples of a line and put them into a queue, a column at a time. The trainer beside this file takes them.

python examples/queue_alone/producer.py & python examples/queue_alone/trainer.py
"""

import sys
import time
from pathlib import Path

import torch

from braidrl.queue.transfer_queue import TransferQueue

address = Path(sys.argv[1] if len(sys.argv) > 1 else "queue_alone.address")
with TransferQueue.serve({"fit": ["x", "y"]}, budget_bytes=1 << 16) as queue:
    address.write_text(queue.address)
    for step in range(50):
        rows, x = list(range(step * 64, step * 64 + 64)), 2 * torch.rand(64, 1) - 1
        queue.put({"x": x}, rows)
        queue.put({"y": 3 * x - 1}, rows)
    queue.finish()
    while queue.usage()["rows"]:
        time.sleep(0.05)
address.unlink()
