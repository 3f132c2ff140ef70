"""`braid data CONFIG`: the data as a run reads it: counts, lengths, samples, and skipped records with reasons.

configuration ──with_data──▶ sources ──▶ a table of lengths, a picture of them, examples as the model will read them
"""

from functools import partial
from typing import Any

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from braidrl.config import Config
from braidrl.data.tables import RESPONSES
from braidrl.errors import UserError
from braidrl.observe.progress import Terminal
from braidrl.runtimes.prepare.fetching import with_fetched
from braidrl.runtimes.prepare.run_data import Prepared, with_data
from braidrl.runtimes.prepare.run_flow import build_flow, evaluation_flow
from braidrl.training.pretrained import load_tokenizer

PERCENTILES = (0, 25, 50, 75, 90, 99, 100)
BARS = " ▁▂▃▄▅▆▇█"
BINS = 40
SAMPLES = 5
THUMBNAIL = 32
"""Greatest width and height of an image in the terminal, in characters of a line and in half lines."""


def show_data(config: Config, console: Console | None = None) -> None:
    """Print the contents of every source in a configuration. Raises UserError for invalid data, as a run does."""
    console = console or Terminal()
    config = with_fetched(config)
    flow, tokenizer = build_flow(config), load_tokenizer(config.model)
    data = with_data(Prepared(config, flow, evaluation_flow(config, flow), tokenizer, bool(config.data.train)))
    named = {
        **{f"data.train {i}" if i else "data.train": source for i, source in enumerate(data.sources)},
        **{f"data.eval.{name}": source for name, source in data.eval_sources.items()},
        **({"data.ptx": data.texts} if data.texts else {}),
    }
    if not named:
        raise UserError("data names no source; give one, as in data.train=train.jsonl")
    for key, source in named.items():
        console.print(f"[bold]{key}[/bold]  {escape(str(source.path))}", soft_wrap=True)
        console.print(
            f"{len(source)} examples, {source.dropped} dropped as longer than "
            f"data.max_prompt_tokens={config.data.max_prompt_tokens}"
        )
        for omission in source.omissions():
            console.print(escape(omission), soft_wrap=True)
        if counts_of_images := source.facts.images:
            ordered = sorted((int(number), count) for number, count in counts_of_images.items())
            console.print("images a row: " + ", ".join(f"{number} in {count} rows" for number, count in ordered))
        lengths = {name: source.lengths(name) for name in ("prompt", *RESPONSES)}
        token_counts = {name: tokens.numpy() for name, tokens in lengths.items() if tokens is not None}
        table = Table("tokens of the", *(f"{p}%" if p % 100 else ("least", "most")[p // 100] for p in PERCENTILES), "")
        for name, tokens in token_counts.items():
            counts, _ = np.histogram(tokens, bins=min(BINS, int(np.ptp(tokens)) + 1))
            tops = np.ceil(counts / counts.max() * (len(BARS) - 1)).astype(int)
            histogram = "".join(BARS[top] for top in tops)
            table.add_row(name, *(f"{number:.0f}" for number in np.percentile(tokens, PERCENTILES)), histogram)
        console.print(table)
        # Examples, evenly spread over the source, decoded from their token ids.
        write = partial(console.print, soft_wrap=True, highlight=False, markup=False)
        for row_number in sorted({round(i * (len(source) - 1) / max(1, SAMPLES - 1)) for i in range(SAMPLES)}):
            example = source[row_number]
            write(f"── example {row_number}, record {example.line}")
            spans, vision = source.images(row_number), data.vision
            if spans is None or vision is None:
                write(tokenizer.decode(source.prompt(row_number).tolist()))
            else:
                write(tokenizer.decode(vision.collapse(source.prompt(row_number).tolist(), spans[0])))
            for number, name in enumerate(RESPONSES, start=1):
                if (response := source.response(row_number, name)) is not None:
                    ids = (
                        response[0].tolist()
                        if not spans or vision is None
                        else vision.collapse(response[0].tolist(), spans[number])
                    )
                    write(f"── {name}: {tokenizer.decode(ids)}")
            for span in (s for part in spans or [] for s in part):
                assert vision is not None
                height, width = vision.store.size(span.name)
                write(f"── image: {width} x {height} pixels, {span.tokens} tokens, {vision.store.path(span.name)}")
                if console.color_system:
                    write(thumbnail(vision.store.open(span.name)))
            if example.answer is not None:
                write(f"── answer: {example.answer}")


def thumbnail(image: Any) -> Text:
    """Return a small picture of an image for a color terminal; each character shows two pixels, one above the other."""
    image.thumbnail((THUMBNAIL, THUMBNAIL))
    width, height = image.size
    pixels, picture = image.load(), Text()
    for top in range(0, height - height % 2, 2):
        for left in range(width):
            upper, lower = ("#{:02x}{:02x}{:02x}".format(*pixels[left, row]) for row in (top, top + 1))
            picture.append("▀", f"{upper} on {lower}")
        picture.append("\n")
    return picture
