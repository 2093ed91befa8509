// A pool of threads that share an index range. The first use makes it, the process keeps it, and a forked child makes its own.
#pragma once

#include <cstddef>
#include <functional>

namespace zeroplan {

// Calls task(part) for each part of [0, parts) on at most `threads` threads, the caller's among them. Returns when all parts
// are done. Several callers take turns. A task must not throw.
void parallel(int threads, std::size_t parts, const std::function<void(std::size_t)>& task);

} // namespace zeroplan
