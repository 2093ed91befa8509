// Events, settings and results that the simulated allocator shares with zeroplan/simulate/allocator/native.py, all as 64-bit
// integers.
#pragma once
#include <cstdint>

namespace zeroplan::allocator {

using i64 = std::int64_t;

constexpr i64 kUnlimited = INT64_MAX;
constexpr i64 kMinBlock = 512;
constexpr i64 kSmallSize = 1 << 20;
constexpr i64 kSmallSegment = 2 << 20;
constexpr i64 kMinLargeAlloc = 10 << 20;
constexpr i64 kRoundLarge = 2 << 20;
constexpr int kRoundupIntervals = 16;
constexpr int kOpBits = 4;
constexpr i64 kRegion = 32 << 20;
constexpr i64 kRegionsEnd = i64(1) << 48;
constexpr i64 kFirstRange = i64(1) << 50;

enum Op { kAlloc, kFree, kRecordStream, kSync, kComplete, kEmptyCache, kMark };
enum Status { kDone, kOutOfMemory, kUnknownOp, kBadRequest, kNotLive, kNotDeferred };
// kSettled: the allocator waited for the device, and so reclaimed the block before its own completion.
enum State : std::uint8_t { kNoBlock, kLive, kDeferred, kSettled, kGone };

// Mirrors _settings() in zeroplan/simulate/allocator/native.py.
struct Config {
  i64 max_split_size, max_non_split_rounding, collect_above, allowed, limit, device_memory, expandable, large_segment;
  i64 divisions[kRoundupIntervals];
};

// Mirrors MarkTotals.
struct Totals {
  i64 event, allocated, peak_allocated, reserved, peak_reserved, requested, active, largest_free;
};

struct SegmentChange {
  i64 event, size, address;
};

// Mirrors _result() in zeroplan/simulate/allocator/native.py.
struct Summary {
  i64 status, event, operand, segment, top, top_event, top_reserved, retries, made, marked;
  Totals final_totals;
};

}  // namespace zeroplan::allocator
