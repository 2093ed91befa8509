// Moves blocks by io_uring: one thread keeps several in flight, with one system call for many.
//
// The file states the kernel's interface (include/uapi/linux/io_uring.h) itself, so that a build needs neither liburing nor
// recent headers. Opening a ring fails where the kernel lacks the interface or a sandbox forbids it.
#include "io.hpp"

#if defined(__linux__)
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

namespace zeroplan {
namespace {

// These numbers are equal on every architecture that has the calls.
constexpr long call_setup = 425, call_enter = 426, call_register = 427;
constexpr std::uint8_t op_read = 22, op_write = 23;
constexpr unsigned enter_getevents = 1, register_probe = 8;
constexpr off_t at_sq_ring = 0, at_cq_ring = 0x8000000, at_sqes = 0x10000000;
constexpr std::uint64_t wake_mark = ~std::uint64_t{0};

struct SqOffsets {
    std::uint32_t head, tail, mask, entries, flags, dropped, array, reserved;
    std::uint64_t user;
};
struct CqOffsets {
    std::uint32_t head, tail, mask, entries, overflow, cqes, flags, reserved;
    std::uint64_t user;
};
struct Params {
    std::uint32_t sq_entries, cq_entries, flags, sq_cpu, sq_idle, features, wq, reserved[3];
    SqOffsets sq;
    CqOffsets cq;
};
struct Sqe {
    std::uint8_t op, flags;
    std::uint16_t priority;
    std::int32_t file;
    std::uint64_t offset, memory;
    std::uint32_t length, op_flags;
    std::uint64_t mark;
    std::uint64_t rest[3];
};
struct Cqe {
    std::uint64_t mark;
    std::int32_t result;
    std::uint32_t flags;
};
static_assert(sizeof(Params) == 120 && sizeof(Sqe) == 64 && sizeof(Cqe) == 16, "the kernel's layout");

struct ProbeOp {
    std::uint8_t op, reserved;
    std::uint16_t flags; // 1: supported
    std::uint32_t more;
};
struct Probe {
    std::uint8_t last, count;
    std::uint16_t reserved;
    std::uint32_t more[3];
    ProbeOp ops[64];
};

class Mapping {
public:
    ~Mapping() {
        if (address_ != MAP_FAILED) munmap(address_, size_);
    }
    bool map(int file, std::size_t size, off_t at) {
        size_ = size;
        address_ = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, file, at);
        return address_ != MAP_FAILED;
    }
    template <class T>
    T* at(std::size_t offset) const {
        return reinterpret_cast<T*>(static_cast<char*>(address_) + offset);
    }

private:
    void* address_ = MAP_FAILED;
    std::size_t size_ = 0;
};

} // namespace

class Ring {
public:
    ~Ring() {
        if (file_ >= 0) close(file_);
    }

    int open(int depth, int wake) {
        wake_ = wake;
        blocks_.resize(static_cast<std::size_t>(depth));
        for (std::size_t slot = 0; slot < blocks_.size(); ++slot) free_.push_back(slot);
        std::memset(&params_, 0, sizeof params_);
        file_ = static_cast<int>(syscall(call_setup, blocks_.size() + 1, &params_)); // and the wake
        if (file_ < 0) return errno;
        Probe probe{};
        if (syscall(call_register, file_, register_probe, &probe, 64) < 0) return errno;
        if (probe.last < op_write || !(probe.ops[op_read].flags & 1) || !(probe.ops[op_write].flags & 1)) return ENOSYS;
        const bool mapped = sq_.map(file_, params_.sq.array + params_.sq_entries * sizeof(std::uint32_t), at_sq_ring) &&
                            cq_.map(file_, params_.cq.cqes + params_.cq_entries * sizeof(Cqe), at_cq_ring) &&
                            sqes_.map(file_, params_.sq_entries * sizeof(Sqe), at_sqes);
        return mapped ? 0 : errno;
    }

    void serve(Engine& engine) {
        arm_wake();
        for (;;) {
            const bool may_add = engine.options.overlap_events || in_flight() == 0;
            Block block;
            while (may_add && !free_.empty() && engine.take(block, false)) {
                if (block.writes()) engine.sum(block);
                const std::size_t slot = free_.back();
                free_.pop_back();
                blocks_[slot] = block;
                push(slot);
                if (engine.options.single_submit) enter(0);
            }
            if (in_flight() == 0 && ended_.empty() && engine.stopping()) return;
            // Submits new blocks before it sums those that have arrived, so that the disk never waits for the sums.
            enter(ended_.empty() ? 1 : 0);
            for (const Ended& one : ended_) engine.end(one.block, one.error);
            ended_.clear();
            reap(engine);
        }
    }

private:
    struct Ended {
        Block block;
        int error;
    };

    std::size_t in_flight() const { return blocks_.size() - free_.size(); }

    Sqe* next_entry() {
        const std::uint32_t slot = tail_ & *sq_.at<std::uint32_t>(params_.sq.mask);
        sq_.at<std::uint32_t>(params_.sq.array)[slot] = slot;
        Sqe* entry = sqes_.at<Sqe>(0) + slot;
        std::memset(entry, 0, sizeof *entry);
        return entry;
    }
    void publish() {
        __atomic_store_n(sq_.at<std::uint32_t>(params_.sq.tail), ++tail_, __ATOMIC_RELEASE);
        ++unsubmitted_;
    }
    void push(std::size_t slot) {
        const Block& block = blocks_[slot];
        Sqe* entry = next_entry();
        entry->op = block.writes() ? op_write : op_read;
        entry->file = block.request->asked.file;
        entry->offset = static_cast<std::uint64_t>(block.offset());
        entry->memory = reinterpret_cast<std::uint64_t>(block.memory());
        entry->length = static_cast<std::uint32_t>(block.left());
        entry->mark = slot;
        publish();
    }
    void arm_wake() {
        Sqe* entry = next_entry();
        entry->op = op_read;
        entry->file = wake_;
        entry->memory = reinterpret_cast<std::uint64_t>(&count_);
        entry->length = sizeof count_;
        entry->mark = wake_mark;
        publish();
    }

    // Submits the pushed blocks and waits for that many completions. The next round tries again where the call is interrupted
    // or the kernel is short of memory (EAGAIN, EBUSY).
    void enter(unsigned wanted) {
        const long taken = syscall(call_enter, file_, unsubmitted_, wanted, wanted ? enter_getevents : 0u, nullptr, 0);
        if (taken > 0) unsubmitted_ -= static_cast<unsigned>(taken);
    }

    void reap(Engine& engine) {
        auto* head = cq_.at<std::uint32_t>(params_.cq.head);
        const std::uint32_t mask = *cq_.at<std::uint32_t>(params_.cq.mask);
        std::uint32_t at = *head;
        while (at != __atomic_load_n(cq_.at<std::uint32_t>(params_.cq.tail), __ATOMIC_ACQUIRE)) {
            const Cqe done = cq_.at<Cqe>(params_.cq.cqes)[at & mask];
            __atomic_store_n(head, ++at, __ATOMIC_RELEASE);
            if (done.mark == wake_mark) {
                arm_wake();
                continue;
            }
            Ended one{blocks_[done.mark], 0};
            if (engine.advance(one.block, done.result, &one.error)) {
                ended_.push_back(one);
                free_.push_back(done.mark);
            } else {
                blocks_[done.mark] = one.block;
                push(done.mark);
            }
        }
    }

    int file_ = -1, wake_ = -1;
    Params params_{};
    Mapping sq_, cq_, sqes_;
    std::uint32_t tail_ = 0;
    unsigned unsubmitted_ = 0;
    std::uint64_t count_ = 0; // receives the value of the wake's event counter
    std::vector<Block> blocks_;
    std::vector<std::size_t> free_;
    std::vector<Ended> ended_; // not summed yet
};

int open_ring(int depth, int wake, Ring** made) {
    auto* ring = new Ring;
    if (const int error = ring->open(depth, wake)) {
        delete ring;
        return error;
    }
    *made = ring;
    return 0;
}

void serve_by_ring(Engine& engine, Ring* ring) {
    ring->serve(engine);
    delete ring;
}

} // namespace zeroplan
#elif !defined(_WIN32)
#include <cerrno>
namespace zeroplan {
int open_ring(int, int, Ring**) { return ENOSYS; }
void serve_by_ring(Engine&, Ring*) {}
} // namespace zeroplan
#endif
