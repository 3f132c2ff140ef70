"""A checkpoint's manifest: the size and SHA-256 of each of its files, written last and checked before any file is used.

files of a checkpoint ──digests──▶ manifest.json        ──resume, export, check──▶ the first file that differs
"""

import hashlib
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from braidrl.runtimes.saving.folders import sync

MANIFEST = "manifest.json"
READERS = 4
"""Number of files read at once; hashing releases the interpreter lock."""


def write_manifest(folder: Path) -> None:
    """Write the manifest of a complete folder, and sync its files to disk.

    Some threads wait for the disk while others hash.

    Raises:
        OSError: The disk is full.
    """
    with ThreadPoolExecutor(READERS) as waiting:
        synced = waiting.map(sync, files_of(folder))
        found = digests(folder)
        list(synced)
    (folder / MANIFEST).write_text(json.dumps({"files": found}, indent=1))


def files_of(folder: Path) -> list[Path]:
    """Return the files of a folder, without its manifest."""
    return sorted(path for path in folder.rglob("*") if path.is_file() and path != folder / MANIFEST)


def digests(folder: Path) -> dict[str, list[Any]]:
    """Return the size in bytes and the SHA-256 of each file, by its path in the folder."""
    files = files_of(folder)
    with ThreadPoolExecutor(READERS) as readers:
        found = list(readers.map(digest, files))
    return {str(path.relative_to(folder)): [path.stat().st_size, one] for path, one in zip(files, found, strict=True)}


def digest(path: Path) -> str:
    """Return a file's SHA-256 in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def damage(folder: Path) -> str:
    """Return the damage of a folder with a manifest, naming the file; empty if each file is as written."""
    try:
        wanted = json.loads((folder / MANIFEST).read_text())["files"]
        found = digests(folder)
    except FileNotFoundError:
        return f"{MANIFEST} is missing"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{MANIFEST} cannot be read ({type(error).__name__})"
    for name in sorted(wanted | found):
        if name not in found:
            return f"{name} is missing"
        if name not in wanted:
            return f"{name} is not of this checkpoint"
        if found[name] != wanted[name]:
            return f"{name} is not as it was written (its size or its checksum differs)"
    return ""
