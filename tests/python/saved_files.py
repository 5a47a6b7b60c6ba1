"""What is in a directory of checkpoints."""

from __future__ import annotations

import json
import pathlib
import re

from mlpo.checkpoints import Checkpoint, find


def verify_all(place: pathlib.Path) -> list[int]:
    """Reads all that are complete, those too that do not count, and compares their hashes; their steps. Nothing must be
    going on in there."""
    steps = []
    for found in find(place):
        if found.complete:
            with Checkpoint(place, found.tag, attempt=found.attempt) as checkpoint:
                checkpoint.verify()
            steps.append(found.step)
    return steps


def loose_files(place: pathlib.Path) -> list[str]:
    """What is no whole part, by nothing but the description of the format: data files without a manifest, manifests
    that were being written, manifests whose data files are gone or cut, and whatever else is in parts' folders. Nothing
    must be going on in there."""
    loose = []
    for folder in place.glob("*/part-*"):
        shown = f"{folder.parent.name}/{folder.name}"
        names = {file.name for file in folder.iterdir()}
        whole = set()
        for manifest in names:
            if not re.fullmatch("manifest-[0-9a-f]{32}", manifest):
                continue
            whole.add(manifest)
            for listed in json.loads((folder / manifest).read_bytes().split(b"\n")[1])["files"]:
                whole.add(listed["name"])
                if listed["name"] not in names:
                    loose.append(f"{shown}/{manifest} without {listed['name']}")
                elif (folder / listed["name"]).stat().st_size < listed["bytes"]:
                    loose.append(f"{shown}/{listed['name']} is cut")
        loose += [f"{shown}/{name}" for name in sorted(names - whole)]
    return loose
