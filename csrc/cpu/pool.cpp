#include "pool.hpp"

#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>

#if defined(_WIN32)
#include <process.h>
#define getpid _getpid
#else
#include <unistd.h>
#endif

namespace zeroplan {
namespace {

class Pool {
public:
    // Runs the task with up to `helpers` threads beside the caller.
    void run(int helpers, std::size_t parts, const std::function<void(std::size_t)>& task) {
        std::lock_guard<std::mutex> turn(turn_);
        grow(helpers);
        if (helpers > started_) helpers = started_;
        {
            std::lock_guard<std::mutex> lock(mutex_);
            task_ = &task;
            parts_ = parts;
            next_.store(0, std::memory_order_relaxed);
            wanted_ = working_ = helpers;
            ++round_;
        }
        wake_.notify_all();
        work();
        std::unique_lock<std::mutex> lock(mutex_);
        done_.wait(lock, [this] { return working_ == 0; });
        task_ = nullptr;
    }

private:
    void grow(int helpers) {
        for (; started_ < helpers; ++started_) {
            try {
                std::thread([this, index = started_] { serve(index); }).detach();
            } catch (const std::system_error&) {
                return; // no further thread can start: the caller and the present threads do the work
            }
        }
    }
    void work() {
        for (std::size_t part; (part = next_.fetch_add(1, std::memory_order_relaxed)) < parts_;) (*task_)(part);
    }
    void serve(int index) {
        unsigned long seen = 0;
        std::unique_lock<std::mutex> lock(mutex_);
        for (;;) {
            wake_.wait(lock, [&] { return round_ != seen; });
            seen = round_;
            if (index >= wanted_) continue;
            lock.unlock();
            work();
            lock.lock();
            if (--working_ == 0) done_.notify_one();
        }
    }

    std::mutex turn_, mutex_;
    std::condition_variable wake_, done_;
    const std::function<void(std::size_t)>* task_ = nullptr;
    std::size_t parts_ = 0;
    std::atomic<std::size_t> next_{0};
    int started_ = 0, wanted_ = 0, working_ = 0;
    unsigned long round_ = 0;
};

// Never destroyed, because its threads wait in it until the process ends. A forked child does not have those threads.
Pool& pool() {
    static std::mutex mutex;
    static Pool* pool = nullptr;
    static int owner = 0;
    std::lock_guard<std::mutex> lock(mutex);
    const int me = static_cast<int>(getpid());
    if (!pool || owner != me) {
        pool = new Pool;
        owner = me;
    }
    return *pool;
}

} // namespace

void parallel(int threads, std::size_t parts, const std::function<void(std::size_t)>& task) {
    if (threads <= 1 || parts <= 1) {
        for (std::size_t part = 0; part < parts; ++part) task(part);
        return;
    }
    const std::size_t helpers = static_cast<std::size_t>(threads) < parts ? threads - 1 : parts - 1;
    pool().run(static_cast<int>(helpers), parts, task);
}

} // namespace zeroplan
