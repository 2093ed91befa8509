// The engine behind the C interface: its queue, its handles, and the order in which requests wait for each other.
#include "io.hpp"

#if defined(_WIN32)
#include "io_none.hpp"
#else
#include <fcntl.h>
#include <unistd.h>
#if defined(__linux__)
#include <sys/eventfd.h>
#endif

#include <cerrno>
#include <chrono>
#include <system_error>

#include "abi.h"

namespace zeroplan {
namespace {

constexpr int most_threads = 64;
// The number of rings that share a queue's blocks, so that several threads sum and submit them.
constexpr int rings_a_queue = 4;
// A direct transfer that stopped early continues from a multiple of this many bytes.
constexpr std::int64_t direct_alignment = 4096;

std::int64_t blocks_of(const Engine& engine, const Request& request) {
    return (request.asked.length + engine.options.block_size - 1) / engine.options.block_size;
}

bool is_direct(int file) {
#if defined(O_DIRECT)
    const int flags = fcntl(file, F_GETFL);
    return flags >= 0 && (flags & O_DIRECT);
#else
    return static_cast<void>(file), false;
#endif
}

} // namespace

int Engine::start() {
    const bool rings = options.backend == ZEROPLAN_IO_URING;
    const int shared = options.queue_depth < rings_a_queue ? options.queue_depth : rings_a_queue;
    int count = options.workers * (rings ? shared : options.queue_depth);
    if (count > most_threads) count = most_threads;
    for (int i = 0; i < count; ++i) {
        Ring* ring = nullptr;
#if defined(__linux__)
        if (rings) {
            const int depth = options.queue_depth / shared + (i % shared < options.queue_depth % shared ? 1 : 0);
            const int wake = eventfd(0, EFD_CLOEXEC);
            if (wake < 0) return errno;
            if (const int error = open_ring(depth, wake, &ring)) {
                close(wake);
                return error;
            }
            std::lock_guard<std::mutex> lock(mutex_);
            wakers_.push_back(wake);
        }
#else
        if (rings) return ENOSYS;
#endif
        try {
            workers_.emplace_back([this, ring] { ring ? serve_by_ring(*this, ring) : serve_by_calls(*this); });
        } catch (const std::system_error&) {
            if (workers_.empty() || ring) return EAGAIN;
            break; // fewer threads do the work
        }
    }
    return 0;
}

Engine::~Engine() {
    {
        std::lock_guard<std::mutex> lock(mutex_);
        stopping_ = true;
        for (const int wake : wakers_) {
            const std::uint64_t one = 1;
            if (write(wake, &one, sizeof one) < 0) continue; // full: it is awake
        }
    }
    work_.notify_all();
    for (std::thread& worker : workers_) worker.join();
    for (const int wake : wakers_) close(wake);
    for (const auto& entry : requests_) delete entry.second;
}

std::int64_t Engine::submit(const ZeroplanIoRequest& asked) {
    auto* request = new Request;
    request->asked = asked;
    request->left = blocks_of(*this, *request);
    if (asked.flags & ZEROPLAN_IO_CHECKSUM) request->sums.resize(static_cast<std::size_t>(request->left));
    std::lock_guard<std::mutex> lock(mutex_);
    const std::int64_t handle = request->handle = ++last_; // whoever waits may end the request at once
    requests_[handle] = request;
    const auto before = requests_.find(asked.after);
    if (before != requests_.end() && !before->second->done) {
        before->second->waiting.push_back(request);
    } else if (before != requests_.end() && before->second->result.error) {
        request->result.error = ECANCELED;
        finish(request);
    } else {
        enqueue(request);
    }
    return handle;
}

void Engine::enqueue(Request* request) {
    if (request->left == 0) return finish(request);
    queue_.push_back(request);
    work_.notify_all();
    for (const int wake : wakers_) {
        const std::uint64_t one = 1;
        if (write(wake, &one, sizeof one) < 0) continue; // full: it is awake
    }
}

// The caller holds the mutex.
void Engine::finish(Request* request) {
    for (std::size_t i = 0; i < request->sums.size() && !request->result.error; ++i) {
        const std::int64_t begin = static_cast<std::int64_t>(i) * options.block_size, left = request->asked.length - begin;
        const std::int64_t size = left < options.block_size ? left : options.block_size;
        request->result.checksum = crc32c_join(request->result.checksum, request->sums[i], static_cast<std::uint64_t>(size));
    }
    request->done = true;
    for (Request* next : request->waiting) {
        if (request->result.error) {
            next->result.error = ECANCELED;
            next->result.offset = next->asked.offset;
            finish(next);
        } else {
            enqueue(next);
        }
    }
    done_.notify_all();
}

bool Engine::wait(std::int64_t handle, int milliseconds, ZeroplanIoResult* result) {
    std::unique_lock<std::mutex> lock(mutex_);
    // Looks the request up again after each wait, since another caller may have ended it.
    const auto ready = [&] {
        const auto found = requests_.find(handle);
        return found == requests_.end() || found->second->done;
    };
    if (!ready() && (milliseconds == 0 || !done_.wait_for(lock, std::chrono::milliseconds(milliseconds), ready))) return false;
    const auto found = requests_.find(handle);
    if (found == requests_.end()) {
        *result = {0, EINVAL, 0};
        return true;
    }
    *result = found->second->result;
    delete found->second;
    requests_.erase(found);
    return true;
}

bool Engine::take(Block& block, bool wait) {
    std::unique_lock<std::mutex> lock(mutex_);
    if (wait) work_.wait(lock, [this] { return stopping_ || !queue_.empty(); });
    if (queue_.empty()) return false;
    Request* request = queue_.front();
    const std::int64_t left = request->asked.length - request->next;
    block = {request, request->next, left < options.block_size ? left : options.block_size, 0};
    request->next += block.size;
    if (request->next == request->asked.length) queue_.pop_front();
    return true;
}

bool Engine::stopping() {
    std::lock_guard<std::mutex> lock(mutex_);
    return stopping_ && queue_.empty();
}

void Engine::sum(const Block& block) {
    Request& request = *block.request;
    if (request.sums.empty()) return;
    const char* begin = static_cast<const char*>(request.asked.memory) + block.begin;
    request.sums[static_cast<std::size_t>(block.begin / options.block_size)] = crc32c(0, begin, static_cast<std::size_t>(block.size));
}

bool Engine::advance(Block& block, std::int64_t count, int* error) {
    *error = 0;
    if (count == -EINTR || count == -EAGAIN) return false;
    if (count < 0) {
        *error = static_cast<int>(-count);
    } else if (count == 0) {
        *error = block.writes() ? EIO : ENODATA;
    } else {
        std::int64_t moved = block.moved + count;
        if (moved < block.size) {
            if (is_direct(block.request->asked.file)) moved -= moved % direct_alignment;
            if (moved > block.moved) {
                block.moved = moved;
                return false;
            }
            *error = block.writes() ? EIO : ENODATA; // less than one aligned piece: the file ends here
        }
        block.moved = moved;
    }
    return true;
}

void Engine::end(const Block& block, int error) {
    if (!error && !block.writes()) sum(block);
    std::lock_guard<std::mutex> lock(mutex_);
    Request* request = block.request;
    if (error && (!request->result.error || block.offset() < request->result.offset)) {
        request->result.error = error;
        request->result.offset = block.offset();
    }
    if (--request->left == 0) finish(request);
}

} // namespace zeroplan

using zeroplan::Engine;

// Makes an engine. Returns null on failure, with its errno in *error.
ZEROPLAN_API void* zeroplan_io_open(const ZeroplanIoOptions* options, std::int32_t* error) {
    auto* engine = new Engine(*options);
    *error = engine->start();
    if (*error) {
        delete engine;
        return nullptr;
    }
    return engine;
}

// Finishes all requests and ends the workers.
ZEROPLAN_API void zeroplan_io_close(void* engine) { delete static_cast<Engine*>(engine); }

// Queues a request and returns its handle, which is above 0. The caller keeps the memory until the request is done.
ZEROPLAN_API std::int64_t zeroplan_io_submit(void* engine, const ZeroplanIoRequest* request) {
    return static_cast<Engine*>(engine)->submit(*request);
}

// Returns 1 and the result when the request is done; the handle is then invalid. Returns 0 if it is not after `milliseconds`.
ZEROPLAN_API int zeroplan_io_wait(void* engine, std::int64_t handle, int milliseconds, ZeroplanIoResult* result) {
    return static_cast<Engine*>(engine)->wait(handle, milliseconds, result) ? 1 : 0;
}
#endif
