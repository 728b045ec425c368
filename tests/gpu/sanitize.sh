#!/bin/sh
# The kernels' GPU tests under NVIDIA's compute-sanitizer: an access out of bounds or misaligned fails them (exit 66).
#
#   tests/gpu/sanitize.sh [pytest arguments]        TOOL=racecheck tests/gpu/sanitize.sh -k digest
#
# Every tensor gets an allocation of its own with a gap behind it, so that a store just past its end is seen; graphs
# can't be captured like that, and their tests are left out, as are those that fill the memory. Slow: minutes to hours.
set -eu
cd "$(dirname "$0")/../.."
tool=${TOOL:-memcheck}
sanitizer=${COMPUTE_SANITIZER:-$(command -v compute-sanitizer || echo /usr/local/cuda/bin/compute-sanitizer)}
pytest=${PYTEST:-$(command -v pytest)}
if [ ! -x "$sanitizer" ]; then
    echo "no compute-sanitizer: install the CUDA toolkit or set COMPUTE_SANITIZER" >&2
    exit 2
fi
if [ $# -eq 0 ]; then
    set -- tests/gpu/test_kernels_gpu.py tests/gpu/test_prefill_gpu.py tests/gpu/test_sampling_gpu.py \
        tests/gpu/test_cache_gpu.py -k "not graph and not beyond and not compiled"
fi
padding=""
if [ "$tool" = memcheck ]; then padding="--padding 512"; fi
# shellcheck disable=SC2086
PYTORCH_NO_CUDA_MEMORY_CACHING=1 exec "$sanitizer" --tool "$tool" $padding --target-processes all \
    --error-exitcode 66 --print-limit 20 "$pytest" -p no:cacheprovider --timeout 3600 "$@"
