"""`make bench`: runs the named benchmarks, or all of them."""

from __future__ import annotations

import sys

from benchmarks import transport

BENCHMARKS = {"transport": transport.main}


def main() -> None:
    names = [name for name in sys.argv[1:] if not name.startswith("-")] or list(BENCHMARKS)
    unknown = [name for name in names if name not in BENCHMARKS]
    if unknown:
        sys.exit(f"no benchmark {unknown[0]!r}; there are {', '.join(BENCHMARKS)}")
    for name in names:
        BENCHMARKS[name]([])


if __name__ == "__main__":
    main()
