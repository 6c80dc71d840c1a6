#!/bin/bash
# Compiles every variant of gate_up.cu into build/ and prints what ptxas says of it, and what is left of products, weights and stores.
cd "$(dirname "$0")" && mkdir -p build
# Triton brings the tool that reads machine code, where the toolkit does not.
dump=$(PATH="$PATH:$(echo ../../../../.venv/lib/python3*/site-packages/triton/backends/nvidia/bin)" command -v cuobjdump)
python3 variants.py | while read -r out macros; do
  log=$(nvcc -gencode=arch=compute_90a,code=sm_90a -O3 -std=c++17 -cubin -Xptxas -v --diag-suppress 177,550 $macros -o "build/$out" ../gate_up.cu 2>&1)
  code=$("$dump" -sass "build/$out" 2>/dev/null)
  echo "$out: $(echo "$log" | grep -oE "C75[0-9]+[^']*|Used [0-9]+ registers|[0-9]+ bytes spill (stores|loads)|setmaxnreg.*|error.*" | tr '\n' ';')" \
    "$(echo "$code" | grep -c HGMMA) HGMMA, $(echo "$code" | grep -c UTMALDG) UTMALDG ($(echo "$code" | grep -c UTMALDG.2D.MULTICAST) multicast)," \
    "$(echo "$code" | grep -c LDGSTS) LDGSTS, $(echo "$code" | grep -c STSM) STSM, $(echo "$code" | grep -cE 'STG\.E\.128|STG.*128') 16-byte stores"
done
