"""Changes a path's limits all the time, as its profile says; started by testbed, and ended by it.

Arguments: profile, cgroup, device as MAJOR:MINOR, read and write limit in bytes a second.
half: while both directions are busy they share the device's time by bytes. The kernel's throttle gives a direction that
begins anew what it may move in 0.1 s, and each change of a limit is such a beginning; so what they move is counted,
too, and what is ahead of the device's time is slower until it is not.
jitter: a tenth of the speed for half a second every few seconds, the same ones in every run.
"""

import random
import sys
import time
from typing import NoReturn

PROFILE, GROUP, DEVICE = sys.argv[1:4]
READ, WRITE = int(sys.argv[4]), int(sys.argv[5])
LOOK_S = 0.02
IDLE_AFTER_LOOKS = 7  # longer than the throttle lets a busy direction wait
CHANGE_S = 0.2  # at least, between two changes for the sake of the device's time
SAVED_S = 0.05  # of time that was not used; a device saves up none, but the throttle comes late
SECTOR = 512


def limit(read: float, write: float) -> None:
    for name, value in (("read", read), ("write", write)):
        with open(f"{GROUP}/blkio.throttle.{name}_bps_device", "w") as file:
            file.write(f"{DEVICE} {int(value)}")


def sectors() -> tuple[int, int]:
    with open(f"/sys/dev/block/{DEVICE}/stat") as file:
        fields = file.read().split()
    return int(fields[2]), int(fields[6])


def half() -> NoReturn:
    shared = READ * WRITE / (READ + WRITE)
    before, busy, both_before = sectors(), [0, 0], None
    looked = changed = time.monotonic()
    ahead_s, scale = 0.0, 1.0  # device time that was used beyond what there was
    while True:
        time.sleep(LOOK_S)
        now, now_s = sectors(), time.monotonic()
        for i in (0, 1):
            busy[i] = IDLE_AFTER_LOOKS if now[i] != before[i] else max(0, busy[i] - 1)
        used_s = ((now[0] - before[0]) / READ + (now[1] - before[1]) / WRITE) * SECTOR
        ahead_s = max(ahead_s + used_s - (now_s - looked), -SAVED_S)
        before, looked, both = now, now_s, min(busy) > 0
        wanted = min(max(1 - ahead_s, 0.5), 1.05)
        if both == both_before and (abs(wanted / scale - 1) < 0.02 or now_s - changed < CHANGE_S):
            continue
        both_before, scale, changed = both, wanted, now_s
        limit(*((shared * scale, shared * scale) if both else (READ * scale, WRITE * scale)))


def jitter() -> NoReturn:
    chance = random.Random(1)
    while True:
        time.sleep(3 + 4 * chance.random())
        limit(READ / 10, WRITE / 10)
        time.sleep(0.5)
        limit(READ, WRITE)


{"half": half, "jitter": jitter}[PROFILE]()
