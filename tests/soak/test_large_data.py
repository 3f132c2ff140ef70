"""A source of ten million examples: the memory of each rank, and the time until the first batch."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from braidrl.config import DataConfig, SourceConfig
from braidrl.data.prompts import load_train
from tests.tiny import TOKENIZER, write_model

ROWS, RANKS, BATCH, BATCHES = 10_000_000, 4, 512, 40
# A rank with its model that opens the index and draws its part of each batch; its figures are measured from there on.
RANK = """
import json, sys, time
from pathlib import Path
import psutil
from braidrl.config import DataConfig, SourceConfig
from braidrl.data.loader import PromptLoader, as_rows
from braidrl.data.prompts import load_train
from braidrl.training.loading import load_decoder
from braidrl.training.pretrained import load_tokenizer

model, data, cache, kept, rank, ranks, batch, batches = sys.argv[1:]
rank, ranks, batch, batches = int(rank), int(ranks), int(batch), int(batches)
decoder, tokenizer = load_decoder(model), load_tokenizer(model)
before = psutil.Process().memory_full_info().uss
start = time.perf_counter()
config = DataConfig(train=[SourceConfig(path=Path(data))], cache=Path(cache))
loader = PromptLoader(load_train(config, tokenizer, kept=[kept] if rank else None))
seen = set()
for number in range(batches):
    rows = as_rows(loader.peek(loader.advance(batch)[rank::ranks]), 1)
    first = time.perf_counter() - start if number == 0 else first
    seen |= {row["line"] for row in rows["metadata"]}
# Pages of the table are shared by all processes of the machine, and the kernel takes them back where it needs room.
peak = psutil.Process().memory_full_info().uss
print(json.dumps({"mb": (peak - before) / 1e6, "first_s": first, "drawn": sorted(seen)}))
"""


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_ten_million_rows_are_mapped_and_start_fast(tmp_path: Path) -> None:
    data, cache, model = tmp_path / "sums.jsonl", tmp_path / "cache", write_model(tmp_path / "model")
    with data.open("w") as file:
        for row in range(ROWS):
            file.write(
                f'{{"prompt": "{row % 9973}+{row % 7919}=", "answer": "{row % 9973 + row % 7919}", "line": {row}}}\n'
            )
    started = time.perf_counter()
    config = DataConfig(train=[SourceConfig(path=data)], cache=cache)
    (source,) = load_train(config, TOKENIZER)
    assert len(source) == ROWS
    print(f"indexed {ROWS} rows of {data.stat().st_size / 1e6:.0f} MB in {time.perf_counter() - started:.0f} s")
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, *map(str, (model, data, cache, source.kept, rank, RANKS, BATCH, BATCHES))],
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(RANKS)
    ]
    content = [json.loads(rank.communicate()[0]) for rank in ranks]
    for rank, one in enumerate(content):
        print(f"rank {rank}: {one['mb']:.0f} MB beyond the model, first batch after {one['first_s']:.2f} s")
    drawn = [line for one in content for line in one["drawn"]]
    assert len(drawn) == len(set(drawn)) == BATCH * BATCHES, "each rank drew its own part"
    assert max(drawn) > 0.99 * ROWS and min(drawn) < 0.01 * ROWS
    assert all(one["mb"] < 300 and one["first_s"] < 5 for one in content)
