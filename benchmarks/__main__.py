"""`make bench`: runs the named benchmarks, or all of them."""

from __future__ import annotations

import sys

from benchmarks import transport

BENCHMARKS = {"transport": transport.main}


def main() -> None:
    first_flag = next((i for i, word in enumerate(sys.argv) if word.startswith("-")), len(sys.argv))
    names, flags = sys.argv[1:first_flag] or list(BENCHMARKS), sys.argv[first_flag:]
    unknown = [name for name in names if name not in BENCHMARKS]
    if unknown:
        sys.exit(f"no benchmark {unknown[0]!r}; there are {', '.join(BENCHMARKS)}")
    for name in names:
        BENCHMARKS[name](flags)


if __name__ == "__main__":
    main()
