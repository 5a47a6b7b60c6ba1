#!/usr/bin/env bash
# tests/bench/testbed and compare on this machine, at the smallest size: limits hold, runs are recorded and not repeated, and
# nothing is left behind, not even after an interrupt. Argument: the folder of the programs. 77: no root or no loop devices.
set -euo pipefail
bin=$1
bench=$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/../bench
code=0
reason=$("$bench/testbed" check 2>&1) || code=$?
[[ $code != 77 ]] || { echo "skipped: $reason"; exit 77; }
((code == 0))
folder=$(mktemp -d "${TMPDIR:-/tmp}/mlpo-compare-test.XXXXXX")
free=$(df --output=avail -BG "$folder" | tail -n 1 | tr -dc 0-9)
((free > 8)) || { echo "skipped: $folder has $free GiB free, and 8 are needed"; rm -r "$folder"; exit 77; }
export TMPDIR=$folder/temporary
mkdir "$TMPDIR"
trap '"$bench/testbed" down --dir "$folder/here/testbed"; rm -rf "$folder"' EXIT
fail() { echo "$1"; exit 1; }
nothing_left() {
  [[ -z $(ls -A "$TMPDIR") ]] || fail "left: $(find "$TMPDIR")"
  [[ ! -e $folder/here ]] || fail "left: $(find "$folder/here")"
  ! grep -F "$folder" /proc/mounts || fail "left mounted"
  ! losetup --list --noheadings --output BACK-FILE | grep -F "$folder" || fail "left on a loop device"
  ! pgrep -f "mlpo-(daemon|bench).*$folder" || fail "left running"
}

"$bench/testbed" up --dir "$folder/here/testbed" --paths 3 --size 1 > "$folder/up"
grep -q "$folder/here/testbed/nvme 345000000 265000000 0.5" "$folder/up"
grep -q "$folder/here/testbed/third 100000000 100000000 0.5" "$folder/up"
device=$(cat "/sys/class/block/$(basename "$(findmnt -no SOURCE "$folder/here/testbed/nvme")")/dev")
"$bench/testbed" set --dir "$folder/here/testbed" nvme 7000000 8000000
# shellcheck disable=SC2016 # the inner shell's
limited=$("$bench/testbed" run --dir "$folder/here/testbed" sh -c 'grep -h "^$1 " "/sys/fs/cgroup/blkio$(sed -n "s/.*:blkio://p" /proc/self/cgroup)"/blkio.throttle.*_bps_device' - "$device")
[[ $limited == "$device 7000000"$'\n'"$device 8000000" ]] || fail "limits are $limited"
"$bench/testbed" run --dir "$folder/here/testbed" sleep 60 & # what runs under the limits ends with them
until grep -q sleep /proc/$!/comm; do sleep 0.05; done
"$bench/testbed" down --dir "$folder/here/testbed"
rmdir "$folder/here"
if wait $!; then fail "it outlived the testbed"; fi
nothing_left

compare=("$bench/compare" --size tiny --without-peer --dir "$folder/here" --gib 2 --bin "$bin" --results "$folder/results")
# At this size bytes let ahead can make a run void, which is told by exit code 1 and run again.
measure() { # OUT ARGUMENTS
  local code=0
  "${compare[@]}" "${@:2}" > "$1" || code=$?
  ! grep -E "^(failed|BROKEN)" "$1" || fail "it failed"
  [[ $code == 0 ]] || { ((code == 1)) && grep -q ^VOID "$1"; } || { cat "$1"; fail "exit code $code"; }
}
measure "$folder/out" --only halved --only three
nothing_left
python3 - "$folder/results" << 'END'
import json, sys
lines = [json.loads(line) for line in open(sys.argv[1])]
assert [(line["experiment"], line["name"]) for line in lines] == [("halved", "nvme"), ("three", "1"), ("three", "2")]
halved, three, _ = (line["result"] for line in lines)
assert halved["check"] == "ok" and all(line["free_bytes"] > 0 for line in lines)
# 256 - 50 blocks of 384 KiB over 265 + 180 MB/s, and 100 more.
assert abs(halved["transfer_s"] - 206 * 393216 / 445e6) < 1e-6, halved
assert abs(three["transfer_s"] - 206 * 393216 / 545e6) < 1e-6, three
# The block layer lets some bytes ahead, but not twice as many.
assert min(halved["step_s"][1:]) > 0.5 * halved["transfer_s"], halved
END
sed -i 's/"void": "[^"]*"/"void": null/' "$folder/results"
measure "$folder/again" --only halved
mkdir "$folder/here" "$folder/here/plain"
code=0
"${compare[@]}" --only ranks > "$folder/refused" || code=$?
[[ $code == 1 && -d $folder/here/plain ]] && grep -q "not ours" "$folder/refused"
rmdir "$folder/here/plain" "$folder/here"
[[ $(wc -l < "$folder/results") == 3 ]] || fail "what was there was run again"

"${compare[@]}" --only ranks > "$folder/interrupted" 2>&1 &
for ((i = 0; i < 300; ++i)); do
  ! grep -q 1/3 "$folder/interrupted" 2> /dev/null || break
  sleep 0.1
done
sleep 1
kill -TERM $!
code=0
wait $! || code=$?
[[ $code == 130 ]] || { cat "$folder/interrupted"; fail "interrupted: exit code $code"; }
nothing_left
