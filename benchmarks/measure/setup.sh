# Source this on a bare GPU machine: installs the wheels of a folder, sets the environment.
#   . benchmarks/measure/setup.sh WHEELS; python3 benchmarks/measure/build_ops.py
python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade \
    --target /tmp/site "$1"/*.whl || exit 1
# ninja then accepts a build carried over from an earlier machine in /tmp/ext.
find /tmp/site -exec touch -d 2020-01-01 {} +
export PYTHONPATH=/tmp/site TORCH_EXTENSIONS_DIR=/tmp/ext PYTHONUNBUFFERED=1
export TORCH_CUDA_ARCH_LIST=9.0 MAX_JOBS="$(nproc)" TOKENIZERS_PARALLELISM=false
# Multicast over NVLink can put GPUs that others share out of service.
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1
CUDA_HOME="$(dirname "$(dirname "$(readlink -f "$(command -v nvcc)")")")"
export CUDA_HOME
