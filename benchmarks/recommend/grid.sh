#!/usr/bin/env bash
# Measures the recommendation's grids under DeepSpeed on capped GPUs, and trains the emitted config.
#
#   benchmarks/recommend/grid.sh OUT GPUS [SECONDS] [SETUP…]
#
# GPUS is 1 or 4: the grids of that size run, those named or all of them, for SECONDS (400) in all. With more GPUs than a
# one-GPU grid needs, each of those runs on a GPU of its own with its share of the cores. The folder .whl must hold wheels of
# DeepSpeed and of what it needs. OUT gets a file of rows a grid; then, on any machine:
#   python -m benchmarks.recommend.measure compare OUT/rows-*.jsonl
set -u
cd "$(dirname "$0")/../.."
out=$(mkdir -p "$1" && cd "$1" && pwd) gpus=$2 seconds=${3:-400}
shift $(($# > 3 ? 3 : $#))
begin=$SECONDS
if [ -d .whl ]; then
  # shellcheck source=benchmarks/measure/setup.sh
  . benchmarks/measure/setup.sh .whl
  export PYTHONPATH="/tmp/site:$PWD"
  # Ops that an earlier run compiled, if they load here.
  [ -f .opscache/ops.tgz ] && tar -xzf .opscache/ops.tgz -C / && touch -d 2021-01-01 /tmp/ext/*/*
  python3 -m benchmarks.measure.build_ops || { rm -rf /tmp/ext && python3 -m benchmarks.measure.build_ops; }
  tar -czf "$out/ops.tgz" -C / tmp/ext
fi
export HF_HUB_OFFLINE=1 PYTORCH_NVML_BASED_CUDA_CHECK=1
cores=$(nproc)
count=$(nvidia-smi -L 2>/dev/null | wc -l)
setups=("$@")
if [ ${#setups[@]} -eq 0 ]; then
  if [ "$gpus" = 1 ]; then setups=(llama1b_1x24 qwen05b_1x24); else setups=(llama1b_4x24 qwen05b_4x24 llama3b_4x40); fi
fi
for setup in "${setups[@]}"; do
  python3 -m benchmarks.recommend.measure specs --setup "$setup" >"/tmp/$setup.jsonl" || exit 1
done
if [ "$gpus" = 1 ]; then
  python3 -m benchmarks.recommend.measure emit /tmp/emitted >/tmp/emitted.jsonl || exit 1
  setups=(emitted "${setups[@]}")
fi
echo "set up after $((SECONDS - begin)) s"

# drive SETUP DEVICES THREADS SECONDS PORT: one grid on these GPUs
drive() {
  CUDA_VISIBLE_DEVICES=$2 OMP_NUM_THREADS=$(($3 > gpus ? $3 / gpus : 1)) python3 -m benchmarks.recommend.driver "/tmp/$1.jsonl" \
    --out "$out/rows-$1.jsonl" --threads "$3" --seconds "$4" --port "$5" 2>&1 | grep --line-buffered -v WARNING
}

devices=$(seq -s, 0 $((gpus - 1)))
if [ "$gpus" = 1 ] && [ "$count" -ge ${#setups[@]} ]; then
  place=0
  for setup in "${setups[@]}"; do
    drive "$setup" "$place" $((cores / ${#setups[@]})) "$seconds" $((29700 + 100 * place)) | sed -u "s/^/$setup: /" &
    place=$((place + 1))
  done
  wait
else
  for setup in "${setups[@]}"; do
    left=$((seconds - (SECONDS - begin)))
    [ "$left" -lt 20 ] && echo "no time for $setup" && continue
    drive "$setup" "$devices" "$cores" "$left" 29700
  done
fi
echo "done after $((SECONDS - begin)) s"
