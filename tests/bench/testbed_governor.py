"""Changes a path's limits all the time, as its profile says; started by testbed, and ended by it.

Arguments: profile, cgroup, device as MAJOR:MINOR, read and write limit in bytes a second.
half: while both directions are busy, each has what it would have if they shared the device's time by bytes.
jitter: a tenth of the speed for half a second every few seconds, the same ones in every run.
"""

import random
import sys
import time
from typing import NoReturn

PROFILE, GROUP, DEVICE = sys.argv[1:4]
READ, WRITE = int(sys.argv[4]), int(sys.argv[5])
LOOK_S = 0.02
# Longer than the kernel's throttle lets a busy direction wait (0.1 s), and each change of a limit gives it a start: if
# it were taken for idle then, both together would have more than the device.
IDLE_AFTER_LOOKS = 10


def limit(read: float, write: float) -> None:
    for name, value in (("read", read), ("write", write)):
        with open(f"{GROUP}/blkio.throttle.{name}_bps_device", "w") as file:
            file.write(f"{DEVICE} {int(value)}")


def sectors() -> tuple[int, int]:
    with open(f"/sys/dev/block/{DEVICE}/stat") as file:
        fields = file.read().split()
    return int(fields[2]), int(fields[6])


def half() -> NoReturn:
    before, busy, both_before = sectors(), [0, 0], None
    while True:
        time.sleep(LOOK_S)
        now = sectors()
        for i in (0, 1):
            busy[i] = IDLE_AFTER_LOOKS if now[i] != before[i] else max(0, busy[i] - 1)
        before, both = now, min(busy) > 0
        if both != both_before:
            both_before = both
            shared = READ * WRITE / (READ + WRITE)
            limit(*((shared, shared) if both else (READ, WRITE)))


def jitter() -> NoReturn:
    chance = random.Random(1)
    while True:
        time.sleep(3 + 4 * chance.random())
        limit(READ / 10, WRITE / 10)
        time.sleep(0.5)
        limit(READ, WRITE)


{"half": half, "jitter": jitter}[PROFILE]()
