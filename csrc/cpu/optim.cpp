// The optimizers' C interface. Chooses the instruction set once, cuts the work into parts, and runs them on several threads.
#include "optim.hpp"

#include <atomic>
#include <cmath>
#include <cstring>
#include <vector>

#include "abi.h"
#include "pool.hpp"

using zeroplan::Kernels;

namespace {

// Elements a part. A few MB of traffic: large enough that handing out parts costs nothing, small enough for uneven cores.
constexpr std::size_t part_size = std::size_t{1} << 17;

bool runs_here(const Kernels& kernels) {
#if defined(__x86_64__) || defined(_M_X64)
    if (&kernels == &zeroplan::kernels_avx512) return __builtin_cpu_supports("avx512f");
    if (&kernels == &zeroplan::kernels_avx2) return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c");
#endif
    return &kernels == &zeroplan::kernels_plain;
}

// Best first.
const std::vector<const Kernels*>& sets() {
    static const std::vector<const Kernels*> all = {
#if defined(__x86_64__) || defined(_M_X64)
        &zeroplan::kernels_avx512,
        &zeroplan::kernels_avx2,
#endif
        &zeroplan::kernels_plain,
    };
    return all;
}

const Kernels* find(const char* name) {
    for (const Kernels* kernels : sets()) {
        if ((!name || std::strcmp(name, kernels->name) == 0) && runs_here(*kernels)) return kernels;
    }
    return nullptr;
}

std::atomic<const Kernels*>& chosen() {
    static std::atomic<const Kernels*> kernels{find(nullptr)};
    return kernels;
}

template <class Run>
void over_parts(std::int64_t n, int threads, Run run) {
    const std::size_t size = static_cast<std::size_t>(n), parts = (size + part_size - 1) / part_size;
    zeroplan::parallel(threads, parts, [&](std::size_t part) {
        const std::size_t begin = part * part_size, end = begin + part_size < size ? begin + part_size : size;
        run(begin, end, part);
    });
}

// A run of elements within one segment (one tensor of a flat buffer).
struct Tile {
    std::int64_t begin, end, segment;
};

} // namespace

const Kernels& zeroplan::chosen_kernels() { return *chosen().load(); }

// Chooses an instruction set: "plain", "avx2" or "avx512"; null for the best. Returns -1 where the processor lacks it.
ZEROPLAN_API int zeroplan_use_instructions(const char* name) {
    const Kernels* kernels = find(name);
    if (!kernels) return -1;
    chosen().store(kernels);
    return 0;
}

// Returns the instruction set in use.
ZEROPLAN_API const char* zeroplan_instructions() { return chosen().load()->name; }

ZEROPLAN_API void zeroplan_adam(const ZeroplanStep* step, int threads) {
    const Kernels& kernels = *chosen().load();
    over_parts(step->n, threads, [&](std::size_t begin, std::size_t end, std::size_t) { kernels.adam(*step, begin, end); });
}

ZEROPLAN_API void zeroplan_adam_blockwise(const ZeroplanBlockwise* a, int threads) {
    const Kernels& kernels = *chosen().load();
    over_parts(a->step.n, threads, [&](std::size_t begin, std::size_t end, std::size_t) { kernels.adam_blockwise(*a, begin, end); });
}

ZEROPLAN_API void zeroplan_lion(const ZeroplanStep* step, int threads) {
    const Kernels& kernels = *chosen().load();
    over_parts(step->n, threads, [&](std::size_t begin, std::size_t end, std::size_t) { kernels.lion(*step, begin, end); });
}

ZEROPLAN_API void zeroplan_sgd(const ZeroplanStep* step, int threads) {
    const Kernels& kernels = *chosen().load();
    over_parts(step->n, threads, [&](std::size_t begin, std::size_t end, std::size_t) { kernels.sgd(*step, begin, end); });
}

ZEROPLAN_API void zeroplan_cast(const ZeroplanCast* cast, int threads) {
    const Kernels& kernels = *chosen().load();
    over_parts(cast->n, threads, [&](std::size_t begin, std::size_t end, std::size_t) { kernels.cast(*cast, begin, end); });
}

// The number of threads does not change the bits.
ZEROPLAN_API double zeroplan_sum_of_squares(const void* values, std::int32_t type, std::int64_t n, int threads) {
    const Kernels& kernels = *chosen().load();
    std::vector<double> sums((static_cast<std::size_t>(n) + part_size - 1) / part_size);
    over_parts(n, threads, [&](std::size_t begin, std::size_t end, std::size_t part) {
        sums[part] = kernels.sum_of_squares(values, type, begin, end);
    });
    double sum = 0.0;
    for (double part : sums) sum += part;
    return sum;
}

// Updates the moments and writes {‖p‖², ‖direction‖²} of each segment to norms[segments][2]. The number of threads does not
// change the bits. The tiles of a segment lie one after another.
ZEROPLAN_API void zeroplan_lamb_moments(const ZeroplanStep* step, const Tile* tiles, std::int64_t count, double* norms,
                                           std::int64_t segments, int threads) {
    const Kernels& kernels = *chosen().load();
    std::vector<double> partial(2 * static_cast<std::size_t>(count));
    zeroplan::parallel(threads, static_cast<std::size_t>(count), [&](std::size_t t) {
        kernels.lamb_moments(*step, tiles[t].begin, tiles[t].end, &partial[2 * t]);
    });
    std::memset(norms, 0, 2 * sizeof(double) * static_cast<std::size_t>(segments));
    for (std::int64_t t = 0; t < count; ++t) {
        norms[2 * tiles[t].segment] += partial[2 * t];
        norms[2 * tiles[t].segment + 1] += partial[2 * t + 1];
    }
}

// p -= rate * trust * direction, trust = ‖p‖ / ‖direction‖ within [min_trust, max_trust], 1 where either is 0.
ZEROPLAN_API void zeroplan_lamb_apply(const ZeroplanStep* step, const Tile* tiles, std::int64_t count, const double* norms, double rate,
                                         double min_trust, double max_trust, int threads) {
    const Kernels& kernels = *chosen().load();
    zeroplan::parallel(threads, static_cast<std::size_t>(count), [&](std::size_t t) {
        const double weight = norms[2 * tiles[t].segment], update = norms[2 * tiles[t].segment + 1];
        double trust = 1.0;
        if (weight != 0.0 && update != 0.0) {
            trust = std::sqrt(weight) / std::sqrt(update);
            trust = trust > max_trust ? max_trust : (trust < min_trust ? min_trust : trust);
        }
        ZeroplanStep part = *step;
        part.rate = static_cast<float>(rate * trust);
        kernels.lamb_apply(part, tiles[t].begin, tiles[t].end);
    });
}
