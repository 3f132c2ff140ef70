"""A checkpoint's manifest: the size and SHA-256 of each of its files, written last and checked before any of them is believed.

files of a checkpoint ──digests──▶ manifest.json        ──resume, export, verify──▶ the first file that is not what was written
"""

import hashlib
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from braidrl.runtimes.saving.folders import sync

MANIFEST = "manifest.json"
READERS = 4
"""How many files are read at once; hashing leaves the interpreter free."""


def write_manifest(folder: Path) -> None:
    """Write the manifest of a folder that holds all that it is going to hold, and wait until those files are on disk.

    Some threads wait for the disk while others hash.

    Raises:
        OSError: the disk is full.
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
    """Return the size in bytes and the SHA-256 of each file of a folder by its path in it."""
    files = files_of(folder)
    with ThreadPoolExecutor(READERS) as readers:
        found = list(readers.map(digest, files))
    return {str(path.relative_to(folder)): [path.stat().st_size, one] for path, one in zip(files, found, strict=True)}


def digest(path: Path) -> str:
    """Return a file's SHA-256 in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def damage(folder: Path) -> str:
    """Return what is wrong with a folder that has a manifest, naming the file, or nothing where each file is what was written."""
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
