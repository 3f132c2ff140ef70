"""One of two ranks on machines of their own that offer weights: `python -m tests.weights.on_machines RANK`; the first
receives them.
"""

from __future__ import annotations

import os
import sys
from contextlib import closing
from datetime import timedelta

import torch
from torch.distributed import TCPStore

from braidrl.cluster.process_groups import join_group
from braidrl.cluster.world import Ranks
from braidrl.config import parse_config
from braidrl.engines.factory import offering_address
from braidrl.weights.boxes import Box
from braidrl.weights.collective import WeightOffer
from braidrl.weights.shards import WeightPart

ADDRESSES, PORT, LIMIT_S = ("10.77.0.1", "10.77.0.2"), 4711, 60.0

if __name__ == "__main__":
    rank, whole = int(sys.argv[1]), torch.arange(8.0)
    limit = timedelta(seconds=LIMIT_S)
    # As ranks of one run.
    os.environ["MASTER_ADDR"] = ADDRESSES[0]
    config = parse_config({"flow": "grpo", "model": "none", "data": {"train": "none"}, "rollout": {"engine": "vllm"}})
    store = TCPStore(ADDRESSES[0], PORT, is_master=rank == 0, wait_for_workers=False, timeout=limit)
    ranks, box = Ranks(join_group(store, rank, 2, LIMIT_S, False, ADDRESSES[0])), Box((4 * rank,), (4,))
    part = WeightPart(["weight"], box.of(whole).clone(), (whole.shape, box))
    with closing(WeightOffer(ranks, offering_address(config), LIMIT_S, torch.device("cpu"))) as offer:
        offered = offer.keep(1, {"weight": part})
        if rank == 0:
            print(dict(offered.tensors())["weight"].tolist())
        ranks.all_gather("the end", None)
