// The C interface of the simulated allocator (allocator.hpp), called by zeroplan/simulate/allocator/native.py.
#include "abi.h"
#include "allocator.hpp"

using namespace zeroplan::allocator;

// Counts the handles (counts[0]) and marks (counts[1]) for which zeroplan_allocator_run needs room.
ZEROPLAN_API void zeroplan_allocator_count(const i64* code, i64 events, i64* counts) {
  i64 allocs = 0, marks = 0;
  for (i64 at = 0; at < events; ++at) {
    const i64 op = code[at] & ((1 << kOpBits) - 1);
    allocs += op == kAlloc;
    marks += op == kMark;
  }
  counts[0] = allocs;
  counts[1] = marks;
}

// Runs a stream of events. Returns the number of changes of segments, and writes the first `segment_capacity` of them to
// `segments`. Returns -1 if this machine runs out of memory itself.
ZEROPLAN_API i64 zeroplan_allocator_run(const i64* config, const i64* code, const i64* value, i64 events,
                                        const i64* addresses, i64 address_count, i64* block_sizes, i64* marks,
                                        i64* segments, i64 segment_capacity, i64* summary) {
  const auto run = [&] {
    Allocator allocator(*reinterpret_cast<const Config*>(config), addresses, address_count, block_sizes,
                        reinterpret_cast<Totals*>(marks), reinterpret_cast<SegmentChange*>(segments), segment_capacity);
    allocator.run(code, value, events, *reinterpret_cast<Summary*>(summary));
    return allocator.changes();
  };
#ifdef __cpp_exceptions
  try {
    return run();
  } catch (...) {
    return -1;
  }
#else  // csrc/wasm/library.cpp
  return run();
#endif
}
