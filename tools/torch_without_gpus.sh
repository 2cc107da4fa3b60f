#!/usr/bin/env bash
# Makes the registry's torch, which is built for GPUs, load without GPU libraries (2.5 GB): each library of them that it
# links, and that is not there, becomes a name of one that has all of their functions and none of their work.
#   tools/torch_without_gpus.sh FOLDER     the folder that torch/ and nvidia/ were unpacked into
set -euo pipefail
cd "$1/torch/lib"
theirs=../../nvidia/cu13/lib
temporary=$(mktemp -d)
trap 'rm -rf "$temporary"' EXIT

nm -D --defined-only ./*.so "$theirs"/*.so.* | awk 'NF > 2 {sub(/@.*/, "", $3); print $3}' >"$temporary/defined"
# name or name@version. A call of any gives 100, "no device"; a library that has none is opened and never called.
nm -D --undefined-only ./*.so | awk '$2 ~ /^(__)?(cu|nv|nccl)/ {print $2}' | sort -u |
  awk -F@ -v versions="$temporary/versions" '
    NR == FNR {defined[$1]; next}
    !($1 in defined) {print ".globl " $1 "\n" $1 ":"; if ($2) members[$2] = members[$2] $1 "; "}
    END {
      print "mov $100, %eax\nret\n.section .note.GNU-stack"
      for (v in members) print v " { " members[v] "};" >versions
    }' "$temporary/defined" - >"$temporary/functions.s"
gcc -shared -nostdlib "$temporary/functions.s" -Wl,--version-script="$temporary/versions" -o libno_gpu.so
for library in *.so; do readelf -d "$library"; done | sed -nE 's/.*\(NEEDED\).*\[(lib(cu|nv|nccl).*)\]/\1/p' | sort -u |
  while read -r name; do [[ -e $theirs/$name ]] || ln -sf libno_gpu.so "$name"; done
