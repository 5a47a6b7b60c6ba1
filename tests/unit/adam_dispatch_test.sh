#!/bin/sh
# adam_dispatch_test.sh LIBRARY: no AVX instruction (their mnemonics begin with v) outside functions compiled for AVX
# sets, no fused multiply-add anywhere: it rounds once where the definition rounds twice.
set -u
library=$1
case $(uname -m) in
  x86_64) ;;
  *) echo "skipped: not an x86-64"; exit 77 ;;
esac
if ! command -v objdump > /dev/null; then
  echo "skipped: no objdump (package binutils)"
  exit 77
fi
objdump -dC --no-show-raw-insn "$library" | awk '
  /^[0-9a-f]+ <.*>:$/ { function_name = $0; next }
  $2 ~ /^v/ && $2 !~ /^ver[rw]$/ {
    if (function_name ~ /::N_AVX2::/) ++avx2
    else if (function_name ~ /::N_AVX3(_[A-Z0-9]+)?::/) ++avx512
    else if (!(function_name in seen)) { seen[function_name]; print "AVX outside dispatched functions: " function_name; bad = 1 }
  }
  $2 ~ /^vfn?m(add|sub)/ { print "fused multiply-add in " function_name ": " $0; bad = 1 }
  END {
    print "instructions in AVX2 functions: " avx2 + 0 ", in AVX-512 functions: " avx512 + 0
    if (avx2 == 0 || avx512 == 0) { print "a set is missing"; bad = 1 }
    exit bad
  }'
