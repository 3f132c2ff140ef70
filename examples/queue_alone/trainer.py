"""A plain PyTorch loop that trains on the rows that the producer beside this file puts into a queue."""

import sys
import time
from pathlib import Path

import torch

from braidrl.queue.transfer_queue import TransferQueue

address = Path(sys.argv[1] if len(sys.argv) > 1 else "queue_alone.address")
while not address.exists():
    time.sleep(0.1)
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
with TransferQueue.connect(address.read_text()) as queue:
    for batch in queue.stream("fit", rows=32):
        loss = (model(batch["x"]) - batch["y"]).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
print(f"y = {model.weight.item():.2f} x {model.bias.item():+.2f}")
