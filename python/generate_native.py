"""Writes the C source of an extension module: python generate_native.py MODULE OUTPUT_C HEADER...

cffi wants declarations without a preprocessor's work in them, so the headers are reduced to them here; they stay the
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
    module, output, *headers = sys.argv[1:]
    ffi = cffi.FFI()
    for header in headers:
        ffi.cdef(declarations(pathlib.Path(header).read_text()))
    ffi.set_source(module, "\n".join(f'#include "mlpo/{pathlib.Path(header).name}"' for header in headers))
    ffi.emit_c_code(output)


if __name__ == "__main__":
    main()
