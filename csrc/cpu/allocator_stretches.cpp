// What is done with a recording's columns beside running them: stretches written out, and what is alive counted. The twins
// are in zeroplan/simulate/stretches.py and timeline.py.
#include "abi.h"
#include "allocator_types.hpp"

using namespace zeroplan::allocator;

namespace {
// PLAY in zeroplan/simulate/stretches.py.
constexpr i64 kPlay = 8;
constexpr i64 kOpMask = (1 << kOpBits) - 1;
}  // namespace

// Writes `code` and `value`, of `count` events, to `whole_code` and `whole_value`, with every kPlay replaced by its stretch.
// `bases` is room for a handle a stretch. The other columns are those of Stretches.
ZEROPLAN_API void zeroplan_stretches_write_out(const i64* code, const i64* value, i64 count, const i64* begins,
                                               const i64* allocations, const i64* op, const i64* home, const i64* index,
                                               const i64* sizes, i64* bases, i64* whole_code, i64* whole_value) {
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
