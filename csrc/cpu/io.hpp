// File I/O: requests of (file, offset, length, memory) cut into blocks, which workers read or write.
//
// An Engine owns the queue and the workers. A worker is a thread that either drives a ring of io_uring with several blocks
// in flight (io_uring.cpp) or moves one block at a time by pread and pwrite (io_threads.cpp). Memory, offsets and lengths
// must be aligned as the file's flags demand (O_DIRECT: 4096); the caller sends unaligned parts through another handle.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <mutex>
#include <thread>
#include <unordered_map>
#include <vector>

extern "C" {

enum ZeroplanIoBackend : std::int32_t { ZEROPLAN_IO_THREADS = 0, ZEROPLAN_IO_URING = 1 };
enum ZeroplanIoFlags : std::int32_t { ZEROPLAN_IO_WRITE = 1, ZEROPLAN_IO_CHECKSUM = 2 };

struct ZeroplanIoOptions {
    std::int64_t block_size; // bytes of one read or write
    std::int32_t backend;
    std::int32_t queue_depth;    // blocks in flight a worker
    std::int32_t workers;        // queues; each is a few rings, or as many threads as blocks in flight
    std::int32_t single_submit;  // one system call a block
    std::int32_t overlap_events; // new blocks are submitted while others are in flight
};

// after: the request that must be done before this one, or 0. A failing request cancels those that wait for it (ECANCELED).
struct ZeroplanIoRequest {
    void* memory;
    std::int64_t offset;
    std::int64_t length;
    std::int64_t after;
    std::int32_t file;
    std::int32_t flags;
};

struct ZeroplanIoResult {
    std::int64_t offset;    // position in the file at which the first failing block stopped
    std::int32_t error;     // errno, 0 when all bytes were moved; ENODATA where the file ended early
    std::uint32_t checksum; // CRC-32C of the whole request, where asked for
};
}

namespace zeroplan {

// Returns the CRC-32C (Castagnoli) of the bytes, continued from the checksum of the bytes before them (0 for none).
std::uint32_t crc32c(std::uint32_t before, const void* bytes, std::size_t size);
// Joins the checksums of two neighbouring ranges; needs the size of the second.
std::uint32_t crc32c_join(std::uint32_t first, std::uint32_t second, std::uint64_t second_size);

struct Request {
    ZeroplanIoRequest asked{};
    std::int64_t handle = 0;
    std::int64_t next = 0;   // bytes handed out
    std::int64_t left = 0;   // blocks not finished
    bool done = false;
    ZeroplanIoResult result{};
    std::vector<std::uint32_t> sums; // by block
    std::vector<Request*> waiting;   // those with after == handle
};

// The part of a request that one worker moves.
struct Block {
    Request* request = nullptr;
    std::int64_t begin = 0, size = 0, moved = 0;

    bool writes() const { return request->asked.flags & ZEROPLAN_IO_WRITE; }
    char* memory() const { return static_cast<char*>(request->asked.memory) + begin + moved; }
    std::int64_t offset() const { return request->asked.offset + begin + moved; }
    std::int64_t left() const { return size - moved; }
};

class Engine {
public:
    explicit Engine(const ZeroplanIoOptions& options) : options(options) {}
    ~Engine();
    // Starts the workers. Returns 0 or an errno.
    int start();
    std::int64_t submit(const ZeroplanIoRequest& asked);
    // Waits up to `milliseconds` (0: not at all). Returns false if the request is not done. After true the handle is invalid.
    bool wait(std::int64_t handle, int milliseconds, ZeroplanIoResult* result);

    // For workers. Takes the next block. Returns false if there is none; with `wait` it first waits for one, or for the stop.
    bool take(Block& block, bool wait);
    bool stopping();
    // Computes a block's checksum: before a write, after a read.
    void sum(const Block& block);
    // Handles a transfer that returned `count` (-errno on failure). Returns true when the block is over, well or with *error.
    // Otherwise the next transfer continues from `moved`.
    bool advance(Block& block, std::int64_t count, int* error);
    // Sums a block that was read, and counts it as finished.
    void end(const Block& block, int error);

    const ZeroplanIoOptions options;

private:
    void enqueue(Request* request);
    void finish(Request* request);

    std::mutex mutex_;
    std::condition_variable work_, done_;
    std::deque<Request*> queue_;
    std::unordered_map<std::int64_t, Request*> requests_;
    std::vector<std::thread> workers_;
    std::vector<int> wakers_; // event counters of the rings
    std::int64_t last_ = 0;
    bool stopping_ = false;
};

// The loop of one thread. It ends when the engine stops and its queue is empty.
void serve_by_calls(Engine& engine);

// A ring of io_uring; `wake` becomes readable when there is work or the engine stops.
class Ring;
int open_ring(int depth, int wake, Ring** made); // 0 or errno
void serve_by_ring(Engine& engine, Ring* ring);  // closes it

} // namespace zeroplan
