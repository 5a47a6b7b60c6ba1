"""cuda_library_test.py LIBRARY SOURCE_DIR ARCHITECTURE...: what libmlpo_cuda.so exports, needs, and has kernels for.

Independent sources: the functions that cuda.h declares; the images in the library's .nv_fatbin section, as cuobjdump
lists them where it is installed, else by the headers in front of them.
"""

import pathlib
import re
import shutil
import struct
import subprocess
import sys

FATBIN_MAGIC = 0xBA55ED50
PTX, CUBIN = 1, 2


def output(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def images_by_headers(library: str) -> set[tuple[int, int]]:
    """(kind, architecture) of every image: a fatbin is a header and images, each with a header of its own."""
    [line] = [line for line in output("readelf", "-SW", library).splitlines() if " .nv_fatbin " in line]
    offset, size = (int(field, 16) for field in line.split(".nv_fatbin", 1)[1].split()[2:4])
    section = pathlib.Path(library).read_bytes()[offset : offset + size]
    found = set()
    at = section.find(struct.pack("<I", FATBIN_MAGIC))
    while at >= 0:
        _, _, header, length = struct.unpack_from("<IHHQ", section, at)
        image, end = at + header, at + header + length
        while image < end:
            kind, _, header, length = struct.unpack_from("<HHIQ", section, image)
            found.add((kind, struct.unpack_from("<I", section, image + 28)[0]))
            image += header + length
        at = section.find(struct.pack("<I", FATBIN_MAGIC), end)
    return found


def images_by_cuobjdump(library: str) -> set[tuple[int, int]]:
    found = set()
    for flag, kind in (("-lelf", CUBIN), ("-lptx", PTX)):
        found |= {(kind, int(sm)) for sm in re.findall(r"\.sm_(\d+)\.", output("cuobjdump", flag, library))}
    return found


def main() -> None:
    library, source, *architectures = sys.argv[1:]
    header = pathlib.Path(source, "client/include/mlpo/cuda.h").read_text()
    declared = sorted(re.findall(r"MLPO_API [^(;]*?(mlpo_\w+)\(", header))
    symbols = [line.split() for line in output("nm", "-D", "--defined-only", library).splitlines()]
    exported = sorted(name.split("@@")[0] for _, kind, name in symbols if kind == "T")
    assert declared == exported, f"cuda.h has {declared}, the library {exported}"
    assert len(declared) > 10, declared
    needed = re.findall(r"NEEDED.*\[(.*)\]", output("readelf", "-d", library))
    assert any(name.startswith("libcudart.so.") for name in needed), f"its CUDA runtime is not shared: {needed}"
    assert not any(name.startswith("libcuda.so") for name in needed), f"it cannot be loaded without a driver: {needed}"

    wanted = {(CUBIN, int(architecture)) for architecture in architectures}
    wanted.add((PTX, max(architecture for _, architecture in wanted)))
    found = images_by_headers(library)
    assert found == wanted, f"wanted images {sorted(wanted)}, the library has {sorted(found)}"
    if shutil.which("cuobjdump"):
        listed = images_by_cuobjdump(library)
        assert listed == wanted, f"wanted images {sorted(wanted)}, cuobjdump lists {sorted(listed)}"
    else:
        print("skipped in part: no cuobjdump to list the images too")
    print(f"passed: kernels for {', '.join(sorted(architectures))}")


main()
