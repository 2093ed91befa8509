// A pool of threads that divides an index range; made on first use, kept for the process, made anew after a fork.
#pragma once

#include <cstddef>
#include <functional>

namespace zeroplan {

// Calls task(part) for each part of [0, parts), at most `threads` at a time, the calling thread among them. Returns when all
// are done. Callers on several threads take turns. Tasks must not throw.
void parallel(int threads, std::size_t parts, const std::function<void(std::size_t)>& task);

} // namespace zeroplan
