"""Writes the C source of mlpo._native: python generate_native.py CLIENT_H OUTPUT_C

cffi wants declarations without a preprocessor's work in them, so the header is reduced to them here; it stays the
only place where the API is written down. Constants come out as `#define NAME ...`, whose values the C compiler fills
in, and the compiler checks every declaration against the header.
"""

import pathlib
import re
import sys

import cffi


def declarations(header: str) -> str:
    """The header without comments, conditionals and macros that are not integer constants."""
    text = re.sub(r"/\*.*?\*/", " ", header, flags=re.DOTALL)
    text = text.replace("\\\n", " ")
    kept = []
    for line in text.splitlines():
        define = re.match(r"#define\s+(MLPO_\w+)\s+(.*)$", line)
        if define and re.fullmatch(r"\(?-?\d+\)?|INT64_MAX", define.group(2).strip()):
            kept.append(f"#define {define.group(1)} ...")
        elif not line.startswith("#"):
            kept.append(line)
    body = "\n".join(kept)
    body = re.sub(r"\bMLPO_API\b", "", body)
    body, opened = re.subn(r'extern "C" \{', "", body)
    if opened != 1:
        raise SystemExit('generate_native.py: the header has no extern "C" block as expected')
    return body[: body.rindex("}", 0, None)] if body.rstrip().endswith("}") else body


def main() -> None:
    header, output = map(pathlib.Path, sys.argv[1:])
    ffi = cffi.FFI()
    ffi.cdef(declarations(header.read_text()))
    ffi.set_source("mlpo._native", '#include "mlpo/client.h"')
    ffi.emit_c_code(str(output))


if __name__ == "__main__":
    main()
