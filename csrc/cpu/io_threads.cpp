// Moves blocks by pread and pwrite, one at a time per thread. Used where io_uring is forbidden or absent.
#include "io.hpp"

#if !defined(_WIN32)
#include <unistd.h>

#include <cerrno>

namespace zeroplan {

void serve_by_calls(Engine& engine) {
    Block block;
    while (engine.take(block, true)) {
        if (block.writes()) engine.sum(block);
        int error = 0;
        for (bool done = false; !done;) {
            const int file = block.request->asked.file;
            const auto left = static_cast<std::size_t>(block.left());
            const ssize_t count = block.writes() ? pwrite(file, block.memory(), left, block.offset())
                                                 : pread(file, block.memory(), left, block.offset());
            done = engine.advance(block, count < 0 ? -errno : count, &error);
        }
        engine.end(block, error);
    }
}

} // namespace zeroplan
#endif
