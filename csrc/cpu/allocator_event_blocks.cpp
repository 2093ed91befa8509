// Work on a recording's columns: writes event blocks out, repeats a step, and finds the live handles. The twins are in
// zeroplan/simulate/event_blocks.py, steady_state.py and timeline.py.
#include "abi.h"
#include "allocator_types.hpp"

using namespace zeroplan::allocator;

namespace {
// PLAY in zeroplan/simulate/event_blocks.py.
constexpr i64 kPlay = 8;
constexpr i64 kOpMask = (1 << kOpBits) - 1;
}  // namespace

// Copies the `count` events of `code` and `value` to `whole_code` and `whole_value`, and replaces every kPlay by its block.
// `bases` has room for one handle a block. The other columns are those of EventBlocks.
ZEROPLAN_API void zeroplan_event_blocks_write_out(const i64* code, const i64* value, i64 count, const i64* begins,
                                                  const i64* allocations, const i64* op, const i64* home,
                                                  const i64* index, const i64* sizes, i64* bases, i64* whole_code,
                                                  i64* whole_value) {
  i64 made = 0;
  for (i64 event = 0; event < count; ++event) {
    const i64 word = code[event], operand = value[event];
    if (word != kPlay) {
      *whole_code++ = word;
      *whole_value++ = operand;
      made += (word & kOpMask) == kAlloc;
      continue;
    }
    bases[operand] = made;
    for (i64 at = begins[operand]; at < begins[operand + 1]; ++at) {
      *whole_code++ = op[at];
      *whole_value++ = op[at] == kAlloc ? sizes[index[at]] : bases[home[at]] + index[at];
    }
    made += allocations[operand];
  }
}

// Appends events `begin` to `end` to `whole_code` and `whole_value`, `times` times. Handles and marks count on, as if the
// program had repeated the step.
ZEROPLAN_API void zeroplan_stream_repeat(const i64* code, const i64* value, i64 begin, i64 end, i64 times, i64* whole_code,
                                         i64* whole_value) {
  i64 handles = 0, marks = 0;
  for (i64 event = begin; event < end; ++event) {
    const i64 op = code[event] & kOpMask;
    handles += op == kAlloc;
    marks += op == kMark;
  }
  for (i64 again = 1; again <= times; ++again) {
    for (i64 event = begin; event < end; ++event) {
      const i64 op = code[event] & kOpMask;
      const bool on_handle = op == kFree || op == kRecordStream || op == kComplete;
      *whole_code++ = code[event];
      *whole_value++ = value[event] + again * (on_handle ? handles : op == kMark ? marks : 0);
    }
  }
}

// Sets the flag of every handle that is alive after the first `count` events.
ZEROPLAN_API void zeroplan_stream_alive(const i64* code, const i64* value, i64 count, std::uint8_t* flags) {
  i64 made = 0;
  for (i64 event = 0; event < count; ++event) {
    const i64 op = code[event] & kOpMask;
    if (op == kAlloc)
      flags[made++] = 1;
    else if (op == kFree)
      flags[value[event]] = 0;
  }
}
