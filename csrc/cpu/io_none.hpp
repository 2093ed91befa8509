// For systems without POSIX files: opening an engine fails, and the caller's Python path moves the bytes.
#pragma once
#include <cerrno>

#include "abi.h"

ZEROPLAN_API void* zeroplan_io_open(const ZeroplanIoOptions*, std::int32_t* error) {
    *error = ENOSYS;
    return nullptr;
}
ZEROPLAN_API void zeroplan_io_close(void*) {}
ZEROPLAN_API std::int64_t zeroplan_io_submit(void*, const ZeroplanIoRequest*) { return 0; }
ZEROPLAN_API int zeroplan_io_wait(void*, std::int64_t, int, ZeroplanIoResult*) { return 1; }
