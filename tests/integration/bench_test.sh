#!/usr/bin/env bash
# mlpo-bench measures a real daemon, and its own check of the result holds. Argument: the folder of the programs.
set -euo pipefail
bin=$1
folder=$(mktemp -d "${TMPDIR:-/tmp}/mlpo-bench-test.XXXXXX")
trap 'rm -rf "$folder"' EXIT
mkdir "$folder/a" "$folder/b"

"$bin/mlpo-bench" train --params 3M --ranks 2 --rank-weights 1,3 --steps 3 --pool 8MiB --block 64Ki \
  --path "$folder/a" --path "$folder/b" --limit "$folder/a=75e6/50e6/0.5" --limit "$folder/b=25e6/25e6/1" --json \
  > "$folder/train.json"
python3 - "$folder/train.json" << 'END'
import json, sys
result = json.load(open(sys.argv[1]))
assert result["check"] == "ok", result
assert result["parameters"] == 3_000_000 and result["ranks"] == 2
# 46 blocks of 64 Ki parameters, 10 of them in the pool, over e = 50 + 12.5 MB/s: far longer than Adam takes.
ideal_s = (46 - 10) * 12 * 65536 / 62.5e6
assert abs(result["ideal_s"] - ideal_s) < 1e-9, (result["ideal_s"], ideal_s)
assert abs(result["limit_share"] - result["ideal_s"] / result["period_s"]) < 1e-9
assert [path["name"] for path in result["paths"]] == ["a", "b"]
assert all(path["read_bytes"] > 0 and path["written_bytes"] > 0 for path in result["paths"])
assert 0 < result["adam_s"] < result["transfer_s"] == result["ideal_s"]
assert len(result["step_s"]) == 3 and all(step_s > 0 for step_s in result["step_s"]), result
assert abs(sum(result["step_s"][1:]) / 2 - result["period_s"]) < 1e-6, result
parts = result["breakdown"]
assert parts["adam_s"] > 0 and parts["grad_s"] > 0, result
assert sum(parts.values()) <= 1.1 * max(result["step_s"]), result  # from the first gradient on
assert 0 < result["memory"]["arena_bytes"] and result["memory"]["pool_bytes"] == 10 * 12 * 65536, result
END

# Settings reach the daemon, by flag and by environment, and wrong ones end it.
train=(train --params 1M --ranks 2 --pool 4MiB --block 64Ki --path "$folder/a" --json)
MLPO_ADAM__TARGET=scalar "$bin/mlpo-bench" "${train[@]}" --set path.a.direct=false --limit "$folder/a=1e3/1e3/1" \
  --at-step 2="touch $folder/reached" > "$folder/void.json"
python3 - "$folder/void.json" << 'END'
import json, sys
result = json.load(open(sys.argv[1]))
assert not result["paths"][0]["direct_io"], result
assert "direct" in result["void"] and "limit_share" in result["void"], result
END
[[ -e $folder/reached ]]
code=0
"$bin/mlpo-bench" "${train[@]}" --set scheduler.no_such_key=1 2> "$folder/error" || code=$?
[[ $code != 0 ]] && grep -q no_such_key "$folder/error"

# The others' steps go on beside a rank that is stopped with its gradients given, and it ends well afterwards.
"$bin/mlpo-bench" "${train[@]}" --steps 5 --stop-rank 1@3 > "$folder/stopped.json"
"$bin/mlpo-bench" "${train[@]}" --steps 5 --skew 0.5 > "$folder/skewed.json"
python3 - "$folder/stopped.json" "$folder/skewed.json" << 'END'
import json, sys
stopped, skewed = (json.load(open(file)) for file in sys.argv[1:])
assert stopped["check"] == skewed["check"] == "ok"
going, late = stopped["rank_step_s"]
assert late[2] > sum(going[3:]), stopped  # in its third step until they had ended
assert abs(sum(going[3:]) / 2 - stopped["period_s"]) < 1e-6, stopped
first, last = skewed["rank_step_s"]
assert last[1] > 0.4 * skewed["step_s"][0], skewed  # with its pause before
END
for wrong in "--skew 0.5 --ranks 1" "--stop-rank 2@1" "--stop-rank 0@5" "--at-step 9=true" "--set x=1"; do
  code=0
  # shellcheck disable=SC2086 # words
  "$bin/mlpo-bench" "${train[@]}" $wrong 2> "$folder/error" || code=$?
  [[ $code == 64 ]] || { echo "$wrong: exit code $code"; exit 1; }
done

# Told alone to end, it ends its daemon and leaves nothing.
mkdir "$folder/temporary"
TMPDIR=$folder/temporary "$bin/mlpo-bench" train --params 3M --steps 1000000 --pool 8MiB --block 64Ki --path "$folder/a" \
  > "$folder/told" 2>&1 &
until pgrep -f "mlpo-daemon --config $folder/temporary" > "$folder/daemon"; do sleep 0.05; done
kill -TERM $!
code=0
wait $! || code=$?
[[ $code != 0 && -z $(ls -A "$folder/temporary") ]] || { ls "$folder/temporary"; cat "$folder/told"; exit 1; }
! pgrep -f "$folder/temporary" || { echo "left running"; exit 1; }

# On one core there is nothing to bind the two ends to; it says so.
if (($(nproc) > 1)); then
  TMPDIR=$folder "$bin/mlpo-bench" ring --operations 1000 --json > "$folder/ring.json"
  # shellcheck disable=SC2016 # the inner shell has the socket
  TMPDIR=$folder "$bin/mlpo-ctl" run --path "$folder/a" --memory 64MiB -- sh -c \
    'exec "$1" ring --socket "$MLPO_SOCKET" --operations 1000 --json' - "$bin/mlpo-bench" > "$folder/ring_there.json"
  python3 - "$folder/ring.json" "$folder/ring_there.json" << 'END'
import json, sys
for file in sys.argv[1:]:
    result = json.load(open(file))
    for kind in ("awake_ns", "asleep_ns", "bare_pingpong_ns", "eventfd_ns"):
        assert 0 < result[kind]["p50"] <= result[kind]["p99"], (kind, result)
    assert result["bare_pingpong_ns"]["p50"] < result["eventfd_ns"]["p50"], result
    assert result["operations_per_s"] > 0 and result["lost_wakeups"] == 0, result
END
else
  echo "skipped: mlpo-bench ring needs two cores"
fi

"$bin/mlpo-bench" adam --params 1Mi --seconds 0.01 --json > "$folder/adam.json"
python3 - "$folder/adam.json" << 'END'
import json, sys
result = json.load(open(sys.argv[1]))
assert len({(types["grad"], types["dtype"]) for types in result["types"]}) == 9, result
for one in (result, *result["types"]):
    assert one["parameters_per_s"] > 0 and one["loop_parameters_per_s"] > 0 and one["ratio"] > 0, one
    assert one["checked_parameters_per_s"] > 0 and one["checked_core_s_per_1e9"] > 0 and one["core_s_per_1e9"] > 0, one
END
code=0
"$bin/mlpo-bench" adam --target z80 2> "$folder/error" || code=$?
[[ $code == 1 ]] && grep -q z80 "$folder/error"

# Updates of memory shared with a program that leads it by lines: with m = v = 0 the first moves p by the learning rate.
python3 - "$bin/mlpo-bench" "$folder/memory" << 'END'
import array, json, math, subprocess, sys
n = 70_001  # more than a piece
zeros, ones = array.array("f", bytes(4 * n)), array.array("f", [1.0]) * n
with open(sys.argv[2], "wb") as file:
    for values in (ones, zeros, zeros, ones):  # p, m, v, gradient and parameter
        values.tofile(file)
turns = [sys.argv[1], "adam-turns", "--memory", sys.argv[2], "--params", str(n), "--grad=float32", "--dtype=float32"]
head, seconds = subprocess.run(turns, input="1\n", check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()
assert json.loads(head)["workers"] > 0 and float(seconds) > 0
found = array.array("f")
with open(sys.argv[2], "rb") as file:
    found.fromfile(file, 4 * n)
p, m, v, param = (found[part * n : part * n + n] for part in range(4))
for values, want in ((p, 1 - 1e-3 * 0.01 - 1e-3), (m, 0.1), (v, 1e-3), (param, p[0])):
    assert all(math.isclose(value, want, rel_tol=1e-6) for value in values), (values[0], values[-1], want)
END

# Without fio it measures the engine alone, and says so.
small=(--block 1MiB --piece 1MiB --depth 2 --size 16MiB --rounds 1 --seconds 0.2)
check_io='
import json, sys
result, fio = json.load(open(sys.argv[1])), sys.argv[2] == "fio"
assert [path["directory"] for path in result["paths"]] == sys.argv[3:], result
for path in result["paths"]:
    assert path["engine"] in ("io_uring", "threads"), path
    for kind in ("read", "write", "mixed"):
        assert path[kind + "_bytes_per_s"] > 0, path
        assert path["fio_" + kind + "_bytes_per_s"] > 0 if fio else path["fio_" + kind + "_bytes_per_s"] is None, path
'
mkdir "$folder/empty"
PATH=$folder/empty "$bin/mlpo-bench" io --path "$folder/a" --path "$folder/b" "${small[@]}" --json \
  > "$folder/io.json" 2> "$folder/error"
grep -q "fio is not installed" "$folder/error"
python3 -c "$check_io" "$folder/io.json" alone "$folder/a" "$folder/b"
if command -v fio > "$folder/which"; then
  "$bin/mlpo-bench" io --path "$folder/b" "${small[@]}" --json > "$folder/io.json"
  python3 -c "$check_io" "$folder/io.json" fio "$folder/b"
else
  echo "skipped: no fio to compare the engine with"
fi
# All that is left is the daemons' own folders.
left=$(find "$folder" -mindepth 1 -name "mlpo-bench-*")
[[ -z $left ]] || { echo "left behind: $left"; exit 1; }
