"""Checkpoints of mlpo.deepspeed, from the command line.

python -m mlpo.deepspeed export DIR [--tag TAG]
"""

from __future__ import annotations

import argparse
import pathlib
import sys
from typing import Sequence

from ._export import export


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m mlpo.deepspeed", description="Checkpoints of mlpo.deepspeed.")
    commands = parser.add_subparsers(dest="command", required=True)
    exporting = commands.add_parser(
        "export",
        help="to DeepSpeed's own format, in place",
        description="Converts a checkpoint of mlpo.deepspeed, in place, to one that DeepSpeed itself, its "
        "zero_to_fp32.py and its ds_to_universal.py take. Needs room for the FP32 state once more, but no memory.",
    )
    exporting.add_argument("directory", type=pathlib.Path, help="the folder that save_checkpoint() was given")
    exporting.add_argument("--tag", help="default: what its file 'latest' names")
    options = parser.parse_args(arguments)
    try:
        export(options.directory, options.tag, said=print)
    except (OSError, ValueError, ImportError) as error:
        print(f"mlpo.deepspeed: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
