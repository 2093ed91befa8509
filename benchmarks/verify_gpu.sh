#!/usr/bin/env bash
# Holds every installed engine's plans against runs on this machine's GPUs.
# Usage: benchmarks/verify_gpu.sh [FOLDER [ENGINE…]]; further arguments of verify in $VERIFY_ARGS.
set -u
cd "$(dirname "$0")/.."
folder=${1:-benchmarks/results}
shift $(($# > 0 ? 1 : 0))
engines=("$@")
if [ ${#engines[@]} -eq 0 ]; then
  engines=(zeroplan fsdp2 ddp)
  python -c 'import deepspeed' 2>/dev/null && engines+=(deepspeed)
fi
mkdir -p "$folder"
worst=0
for engine in "${engines[@]}"; do
  # shellcheck disable=SC2086 # several words are meant
  python -m zeroplan verify --engine "$engine" --json ${VERIFY_ARGS:-} >"$folder/verify_$engine.json"
  code=$?
  [ $code -gt $worst ] && worst=$code
done
exit $worst
