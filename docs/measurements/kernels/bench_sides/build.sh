#!/bin/bash
# Compiles sides.cu and the variants of down_sorted.cu into build/ and prints what ptxas says of them.
cd "$(dirname "$0")" && mkdir -p build
nvcc -arch=sm_90a -O3 -std=c++17 -cubin -o build/sides.cubin sides.cu
python3 side_variants.py | while read -r out macros; do
  log=$(nvcc -gencode=arch=compute_90a,code=sm_90a -O3 -std=c++17 -cubin -Xptxas -v --diag-suppress 177,550 $macros -o "build/$out" ../down_sorted.cu 2>&1)
  echo "$out: $(echo "$log" | grep -oE "C75[0-9]+[^']*|[0-9]+ bytes spill (stores|loads)|error.*" | tr '\n' ';')"
done
