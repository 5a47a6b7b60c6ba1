#!/bin/bash
# client_library_test.sh CC SHARED STATIC SOURCE_DIR SANITIZE: what the client libraries export and need.
#
# Independent sources: the functions that client.h declares, and a C compiler that links without libstdc++.
set -euo pipefail
cc=$1 shared=$2 static=$3 source=$4 sanitize=$5
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
fail() { echo "FAILED: $*" >&2; exit 1; }

# Declared: what stands in front of "(" after MLPO_API.
tr '\n' ' ' < "$source/client/include/mlpo/client.h" | grep -o 'MLPO_API [^(;]*(' | grep -o 'mlpo_[a-z_]*($' |
  tr -d '(' | sort > "$work/declared"
nm -D --defined-only "$shared" | awk '$2 == "T" {print $3}' | sort > "$work/exported"
sed 's/@@.*//' "$work/exported" > "$work/exported_names"
diff "$work/declared" "$work/exported_names" || fail "client.h (left) and the library (right) differ"
grep -v '@@MLPO_0\.[1234]$' "$work/exported" && fail "symbols without their version"
[ "$(wc -l < "$work/declared")" -gt 20 ] || fail "no functions found in client.h"
readelf -d "$shared" | grep -q 'SONAME.*\[libmlpo\.so\.0\]' || fail "SONAME is not libmlpo.so.0"

if [ -n "$sanitize" ]; then
  echo "skipped in part: -fsanitize=$sanitize needs the C++ runtime, and a C program built with it too"
  exit 0
fi
readelf -d "$shared" | grep NEEDED | grep -E 'stdc\+\+|libgcc_s' && fail "the library needs the C++ runtime"
cat > "$work/program.c" <<'C'
#include <mlpo/client.h>
#include <stdio.h>
int main(void) {
  mlpo_client* client = 0;
  struct mlpo_connect_options options = MLPO_CONNECT_OPTIONS_INIT;
  options.socket = "/nonexistent/mlpo.sock";
  options.job = "c";
  if (mlpo_connect(&options, &client) != -2) return 1;
  return printf("%s\n", mlpo_last_error()) < 0;
}
C
for library in "$shared" "$static"; do
  "$cc" -std=c11 -Wall -Wextra -Werror -I"$source/client/include" "$work/program.c" "$library" -pthread \
    -Wl,-rpath,"$(dirname "$shared")" -o "$work/program"
  "$work/program" | grep -q /nonexistent/mlpo.sock || fail "the program linked with $library"
  ldd "$work/program" | grep -E 'stdc\+\+' && fail "a C program with $library needs libstdc++"
done
echo "passed"
