#!/bin/sh
# The kernels' GPU tests under NVIDIA's compute-sanitizer: an access out of bounds or misaligned fails them (exit 66).
#
#   tests/gpu/sanitize.sh                           every file, its cases that are small enough: about 100 s each
#   tests/gpu/sanitize.sh tests/gpu/test_decode_gpu.py [pytest arguments]
#   TOOL=racecheck tests/gpu/sanitize.sh tests/gpu/test_decode_gpu.py -k in_fp8
#
# Every tensor gets an allocation of its own with a gap behind it, so that a store just past its end is seen; graphs
# can't be captured like that, and their tests are left out, as are those that fill the memory.
set -eu
cd "$(dirname "$0")/../.."
tool=${TOOL:-memcheck}
sanitizer=${COMPUTE_SANITIZER:-$(command -v compute-sanitizer || echo /usr/local/cuda/bin/compute-sanitizer)}
pytest=${PYTEST:-$(command -v pytest)}
if [ ! -x "$sanitizer" ]; then
    echo "no compute-sanitizer: install the CUDA toolkit or set COMPUTE_SANITIZER" >&2
    exit 2
fi
padding=""
if [ "$tool" = memcheck ]; then padding="--padding 512"; fi

sanitize() {
    echo "$tool: $*"
    # shellcheck disable=SC2086
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 "$sanitizer" --tool "$tool" $padding --target-processes all \
        --error-exitcode 66 --print-limit 20 "$pytest" -q -p no:cacheprovider --timeout 3600 "$@"
}

if [ $# -gt 0 ]; then
    sanitize "$@"
    exit
fi
failed=0
small="not graph and not beyond and not compiled and not 131072 and not engine"
for file in kernels sampling cache encoders; do
    sanitize "tests/gpu/test_${file}_gpu.py" -k "$small" || failed=$?
done
sanitize tests/gpu/test_decode_gpu.py -k "$small and not lengths3" || failed=$?
sanitize tests/gpu/test_prefill_gpu.py \
    -k "touches or without or other_head or fused or few_queries or (batches and dtype1 and chunked)" || failed=$?
sanitize tests/gpu/test_matmul_gpu.py -k "larger_matrix or (odd_sizes and dtype0)" || failed=$?
exit "$failed"
