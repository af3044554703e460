"""A tag's folder: whole or not there, whatever interrupts a save."""

import contextlib
import json
import os
from pathlib import Path
from unittest import mock

import pytest

from ds_tsp import tag as tags


def write(root: Path, tag: str, content: str) -> None:
    tags.clear(str(root), tag)
    work = root / tags.partial(tag)
    (work / "zero").mkdir(parents=True)
    (work / "zero" / "weights").write_text(content)
    tags.commit(str(root), tag, {"kind": "ranks"}, "latest")


@pytest.mark.parametrize("tag", ["step1", "run/step1"])
def test_a_tag_that_is_written_again(tmp_path: Path, tag: str) -> None:
    for content in ("old", "newer"):
        write(tmp_path, tag, content)
        folder = tmp_path / (tmp_path / "latest").read_text()
        assert folder == tmp_path / tag and (folder / "zero/weights").read_text() == content
        facts = tags.read_facts(folder)
        assert facts == {"version": 1, "kind": "ranks", "files": {"zero/weights": len(content)}}
        tags.check_files(folder, facts["files"].items())
        assert [p.name for p in folder.parent.iterdir() if p.name.startswith(".")] == []


class Killed(BaseException):
    pass


@pytest.mark.parametrize("name", ["rename", "replace", "fsync", "rmtree", "write_text"])
@pytest.mark.parametrize("n", range(6))
@pytest.mark.parametrize("tag", ["step1", "step2"])
def test_killed_at_every_operation(tmp_path: Path, tag: str, name: str, n: int) -> None:
    """The n-th operation of a kind never happens: what `latest` names is the old or the new one, and the next save
    succeeds; where the tag was there before, and where it was not."""
    write(tmp_path, "step1", "old")
    owner = {"rename": Path, "write_text": Path, "rmtree": tags.shutil}.get(name, os)
    original, left = getattr(owner, name), iter(range(n))

    def operation(*args, **kwargs):
        if next(left, None) is None:
            raise Killed
        return original(*args, **kwargs)

    with mock.patch.object(owner, name, operation), contextlib.suppress(Killed):
        write(tmp_path, tag, "new")
    folder = tmp_path / (tmp_path / "latest").read_text()
    tags.settle(folder)
    facts = tags.read_facts(folder)
    tags.check_files(folder, facts["files"].items())
    assert (folder / "zero/weights").read_text() in ("old", "new")
    write(tmp_path, tag, "third")
    assert (tmp_path / tag / "zero/weights").read_text() == "third"
    assert {p.name for p in tmp_path.iterdir()} == {"latest", "step1", tag}


def test_refusals(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there is no checkpoint .*gone"):
        tags.read_facts(tmp_path / "gone")
    with pytest.raises(ValueError, match="ds_tsp.json is missing: .* not saved by ds_tsp"):
        tags.read_facts(tmp_path)
    (tmp_path / tags.FACTS).write_text(json.dumps({"version": 2}))
    with pytest.raises(ValueError, match="has version 2; this ds_tsp reads version 1"):
        tags.read_facts(tmp_path)
    with pytest.raises(ValueError, match="shard is missing"):
        tags.check_files(tmp_path, [("shard", 3)])
    (tmp_path / "shard").write_text("ab")
    with pytest.raises(ValueError, match="shard has 2 bytes, but 3 were saved"):
        tags.check_files(tmp_path, [("shard", 3)])
