#!/bin/bash
# Compiles every variant of down_in_slots.cu into build/.
cd "$(dirname "$0")" && mkdir -p build
root=../../../..
{ cat $root/src/wide/kernels/native/hopper.cuh; python3 header.py; cat ../down_in_slots.cu; } > build/whole.cu
one() {
  name=$1; shift
  nvcc -arch=sm_90a -O3 -std=c++17 -cubin --diag-suppress 177,550 -DFLOAT16=0 -DSTAGES=6 -DSHARED_BYTES=228192 "$@" -o "build/$name.cubin" build/whole.cu 2>&1 | grep -v C7519
  echo "$name: $(cuobjdump -sass "build/$name.cubin" | grep -c HGMMA) HGMMA"
}
one ping; one free -DPING=0; one shared -DPING=0 -DCLUSTER=2
one ping-no-loads -DLOADS=0; one ping-no-spread -DEXPAND=0; one ping-products -DLOADS=0 -DEXPAND=0
