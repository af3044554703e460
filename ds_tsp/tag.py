"""One checkpoint's folder on disk: what is in it, whether it is whole, and how it takes its place in one step.

A tag is written beside its place, as ``.<tag>.partial``, and renamed when every rank has written its files, so a folder
that bears the tag's name is whole. No processes in here: one rank calls what changes the disk.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

FACTS = "ds_tsp.json"  # what the tag holds; the last file to be written
RANKS = "ds_tsp_ranks.pt"  # what each rank had beside DeepSpeed's files: random generators
VERSION = 1


def partial(tag: str) -> str:
    """The tag under which a save that is not finished is written."""
    head, tail = os.path.split(tag)
    return os.path.join(head, f".{tail}.partial")


def _replaced(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.old")


def settle(folder: Path) -> None:
    """Undo what a save left when it was killed between its two renames: the tag's former self takes its place
    again."""
    old = _replaced(folder)
    if old.is_dir() and not folder.exists():
        old.rename(folder)


def clear(save_dir: str, tag: str) -> None:
    """Remove what interrupted saves of this tag left."""
    folder = Path(save_dir, tag)
    settle(folder)
    for left in (Path(save_dir, partial(tag)), _replaced(folder)):
        if left.exists():
            shutil.rmtree(left)


def commit(save_dir: str, tag: str, facts: dict[str, Any], latest: str | None) -> None:
    """Write `facts`, let the finished folder take the tag's place, and point the file `latest` at it.

    A tag that was there stays whole until the new one has its name; `latest` is replaced in one step.
    """
    work, folder = Path(save_dir, partial(tag)), Path(save_dir, tag)
    sizes = {str(p.relative_to(work)): p.stat().st_size for p in sorted(work.rglob("*")) if p.is_file()}
    _write(work / FACTS, json.dumps({"version": VERSION, **facts, "files": sizes}))
    old = _replaced(folder)
    if folder.exists():
        folder.rename(old)
    work.rename(folder)
    sync(folder.parent)
    if latest is not None:
        beside = Path(save_dir, f".{latest}.partial")
        _write(beside, tag)
        os.replace(beside, Path(save_dir, latest))
        sync(save_dir)
    with suppress(OSError):  # it is saved; the next save of this tag removes what is left
        if old.exists():
            shutil.rmtree(old)


def read_facts(folder: Path) -> dict[str, Any]:
    """What `commit` wrote. Raises ValueError if `folder` is no tag of ds_tsp."""
    if not folder.is_dir():
        raise ValueError(f"there is no checkpoint {folder}")
    try:
        facts = json.loads((folder / FACTS).read_text())
    except FileNotFoundError:
        raise ValueError(
            f"{folder / FACTS} is missing: this checkpoint was not saved by ds_tsp, and its files hold no slices of "
            "this engine; load plain weights into the model before ds_tsp.initialize"
        ) from None
    except (OSError, ValueError) as error:
        raise ValueError(f"{folder / FACTS} cannot be read: {error}") from None
    if facts.get("version") != VERSION:
        raise ValueError(f"{folder / FACTS} has version {facts.get('version')}; this ds_tsp reads version {VERSION}")
    return facts


def check_files(folder: Path, sizes: Iterable[tuple[str, int]]) -> None:
    """Raises ValueError naming the first file that is missing or has another size than when it was saved."""
    for name, size in sizes:
        try:
            found = (folder / name).stat().st_size
        except OSError:
            raise ValueError(f"{folder / name} is missing; the checkpoint had it when it was saved") from None
        if found != size:
            raise ValueError(f"{folder / name} has {found} bytes, but {size} were saved: it is truncated or changed")


def sync(path: str | os.PathLike[str]) -> None:
    """Have the disk hold what was written to `path`, a file or a folder."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _write(path: Path, text: str) -> None:
    path.write_text(text)
    sync(path)
