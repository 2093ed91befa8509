// Several threads write, read back, chain and fail requests on one engine, for the sanitizers to watch (test_sanitizers.py).
#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <thread>
#include <vector>

#include "io.hpp"

extern "C" {
void* zeroplan_io_open(const ZeroplanIoOptions*, std::int32_t*);
void zeroplan_io_close(void*);
std::int64_t zeroplan_io_submit(void*, const ZeroplanIoRequest*);
int zeroplan_io_wait(void*, std::int64_t, int, ZeroplanIoResult*);
std::uint32_t zeroplan_crc32c(const void*, std::int64_t, int, int);
}

namespace {

ZeroplanIoResult finish(void* engine, std::int64_t handle) {
    ZeroplanIoResult result{};
    while (!zeroplan_io_wait(engine, handle, 100, &result)) continue;
    return result;
}

// Faults found.
int exercise(void* engine, int file, int thread) {
    int faults = 0;
    const std::int64_t size = 50 * 1024 + thread, place = thread * 100000;
    std::vector<unsigned char> source(static_cast<std::size_t>(size)), back(source.size());
    for (int turn = 0; turn < 30; ++turn) {
        for (std::size_t i = 0; i < source.size(); ++i) source[i] = static_cast<unsigned char>(i * 7 + i / 251 + turn + thread);
        const ZeroplanIoRequest write{source.data(), place, size, 0, file, ZEROPLAN_IO_WRITE | ZEROPLAN_IO_CHECKSUM};
        const std::int64_t written = zeroplan_io_submit(engine, &write);
        const ZeroplanIoRequest read{back.data(), place, size, written, file, ZEROPLAN_IO_CHECKSUM};
        const std::int64_t read_back = zeroplan_io_submit(engine, &read);
        const ZeroplanIoResult got = finish(engine, read_back), put = finish(engine, written);
        const std::uint32_t sum = zeroplan_crc32c(source.data(), size, 2, 1);
        faults += got.error || put.error || got.checksum != sum || put.checksum != sum || source != back;
        const ZeroplanIoRequest beyond{back.data(), std::int64_t{1} << 40, size, 0, file, 0};
        const std::int64_t failing = zeroplan_io_submit(engine, &beyond);
        const ZeroplanIoRequest next{back.data(), 0, size, failing, file, 0};
        const std::int64_t cancelled = zeroplan_io_submit(engine, &next);
        faults += finish(engine, cancelled).error != ECANCELED;
        faults += finish(engine, failing).error != ENODATA;
    }
    return faults;
}

} // namespace

int main(int, char** arguments) {
    int faults = 0;
    for (const std::int32_t backend : {ZEROPLAN_IO_THREADS, ZEROPLAN_IO_URING}) {
        for (const std::int32_t overlap : {0, 1}) {
            const ZeroplanIoOptions options{8192, backend, 4, 2, 1 - overlap, overlap};
            std::int32_t error = 0;
            void* engine = zeroplan_io_open(&options, &error);
            if (!engine) {
                std::printf("backend %d is not to be had: errno %d\n", backend, error);
                faults += backend == ZEROPLAN_IO_THREADS;
                continue;
            }
            const int file = open(arguments[1], O_RDWR | O_CREAT | O_TRUNC, 0600);
            std::vector<std::thread> threads;
            std::vector<int> found(3);
            for (int t = 0; t < 3; ++t) {
                threads.emplace_back([&, t] { found[static_cast<std::size_t>(t)] = exercise(engine, file, t); });
            }
            for (std::thread& thread : threads) thread.join();
            for (const int count : found) faults += count;
            // What nobody waits for is finished before the engine is gone.
            std::vector<char> left(100000, 'x');
            const ZeroplanIoRequest last{left.data(), 0, 100000, 0, file, ZEROPLAN_IO_WRITE};
            zeroplan_io_submit(engine, &last);
            zeroplan_io_close(engine);
            char end = 0;
            faults += pread(file, &end, 1, 99999) != 1 || end != 'x';
            close(file);
        }
    }
    std::printf("%d faults\n", faults);
    return faults != 0;
}
