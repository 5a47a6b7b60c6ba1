#!/bin/bash
# readme_test.sh BUILD_FOLDER SOURCE_FOLDER SANITIZE: what README.md says about configuration, installation and C holds.
# The programs and the configuration are taken from README.md itself.
set -euo pipefail
build=$1 source=$2 sanitize=$3
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
fail() {
  echo "FAILED: $*" >&2
  exit 1
}
# block LANGUAGE: the one code block of README.md in it.
block() {
  local found
  found=$(awk -v start="^\`\`\`$1\$" '/^```$/ { inside = 0 } inside { print } $0 ~ start { inside = 1 }' "$source/README.md")
  [[ -n $found ]] || fail "README.md has no block in $1"
  printf '%s\n' "$found"
}

block toml | sed "s|\"/|\"$work/|" > "$work/mlpo.toml"
mkdir -p "$work/nvme0/scratch" "$work/lustre/project/scratch"
"$build/bin/mlpo-daemon" --config "$work/mlpo.toml" --check-config || fail "README.md's configuration is not accepted"
# An independent look at what was understood: 64 GiB, and a speed in bytes per second.
"$build/bin/mlpo-daemon" --config "$work/mlpo.toml" --print-config > "$work/printed"
grep -q 'pool.*64GiB' "$work/printed" || fail "the pool is not what README.md says: $(cat "$work/printed")"

if [[ -n $sanitize ]]; then
  echo "skipped: a program in C would have to be built with -fsanitize=$sanitize as well"
  exit 77
fi
cmake --install "$build" --prefix "$work/prefix" > /dev/null || fail "cmake --install"
pc=$(find "$work/prefix" -name mlpo.pc)
[[ -n $pc ]] || fail "no mlpo.pc was installed"
for file in bin/mlpo-daemon bin/mlpo-ctl include/mlpo/client.h include/mlpo/client.hpp; do
  [[ -e $work/prefix/$file ]] || fail "$file was not installed"
done
# A copy elsewhere works too: nothing has the prefix written into it.
mv "$work/prefix" "$work/moved"
pc=$work/moved/${pc#"$work/prefix/"}
export PKG_CONFIG_PATH=${pc%/*}
[[ $(pkg-config --modversion mlpo) == $("$work/moved/bin/mlpo-ctl" --version | cut -d ' ' -f 2) ]] || fail "versions differ"
block c > "$work/example.c"
# shellcheck disable=SC2046
"${CC:-cc}" -std=c11 -Wall -Wextra -Werror "$work/example.c" -o "$work/example" $(pkg-config --cflags --libs mlpo) ||
  fail "README.md's program in C does not compile"
mkdir "$work/one" "$work/two"
printed=$(LD_LIBRARY_PATH=$(pkg-config --variable=libdir mlpo) "$work/moved/bin/mlpo-ctl" run --path "$work/one" \
  --path "$work/two" --memory 64MiB -- "$work/example" 2> "$work/log") ||
  fail "README.md's program in C failed: $(cat "$work/log")"
# The first step of AdamW from 0 moves every parameter by -lr * g / (|g| + eps).
[[ $printed == "-0.001000 -0.001000" ]] || fail "README.md's program in C printed '$printed'"
echo "README.md's configuration, installation and program in C work"
