#!/usr/bin/env bash
# mlpo-bench measures a real daemon, and its own check of the result holds. Argument: the folder of the programs.
set -euo pipefail
bin=$1
folder=$(mktemp -d "${TMPDIR:-/tmp}/mlpo-bench-test.XXXXXX")
trap 'rm -rf "$folder"' EXIT
mkdir "$folder/a" "$folder/b"

"$bin/mlpo-bench" train --params 3M --ranks 2 --rank-weights 1,3 --steps 3 --pool 8MiB --block 64Ki \
  --path "$folder/a" --path "$folder/b" --limit "$folder/a=300e6/200e6/0.5" --limit "$folder/b=100e6/100e6/1" --json \
  > "$folder/train.json"
python3 - "$folder/train.json" << 'END'
import json, sys
result = json.load(open(sys.argv[1]))
assert result["check"] == "ok", result
assert result["parameters"] == 3_000_000 and result["ranks"] == 2
# 46 blocks of 64 Ki parameters, 10 of them in the pool, over e = 200 + 50 MB/s.
ideal_s = (46 - 10) * 12 * 65536 / 250e6
assert abs(result["ideal_s"] - ideal_s) < 1e-9, (result["ideal_s"], ideal_s)
assert abs(result["limit_share"] - result["ideal_s"] / result["period_s"]) < 1e-9
assert [path["name"] for path in result["paths"]] == ["a", "b"]
assert all(path["read_bytes"] > 0 and path["written_bytes"] > 0 for path in result["paths"])
END

"$bin/mlpo-ctl" run --path "$folder/a" --memory 64MiB -- "$bin/mlpo-bench" ring --operations 1000 --json \
  > "$folder/ring.json"
python3 - "$folder/ring.json" << 'END'
import json, sys
result = json.load(open(sys.argv[1]))
assert 0 < result["awake_ns"]["p50"] <= result["awake_ns"]["p99"], result
assert result["operations_per_s"] > 0 and result["lost_wakeups"] == 0, result
END
