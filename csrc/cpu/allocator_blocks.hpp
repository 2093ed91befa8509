// Blocks and pools of the simulated allocator, and how sizes are rounded: the twin of zeroplan/simulate/allocator_blocks.py.
#pragma once
#include <algorithm>
#include <set>
#include <vector>

#include "allocator_types.hpp"

namespace zeroplan::allocator {

struct Pool;

struct Block {
  i64 address, size;
  Pool* pool;
  Block* prev;
  Block* next;
  i64 handle = -1;
  i64 requested = 0;
  i64 age_base = 0;
  i64 range_base = -1;
  int pending = 0;
  bool allocated = false;
  bool mapped = true;
  std::vector<i64> streams;

  bool is_free() const { return !allocated && pending == 0; }
  bool is_split() const { return prev != nullptr || next != nullptr; }
};

struct BySize {
  using is_transparent = void;
  bool operator()(const Block* a, const Block* b) const {
    return a->size != b->size ? a->size < b->size : a->address < b->address;
  }
  bool operator()(const Block* a, i64 size) const { return a->size < size; }
};

struct ByAddress {
  bool operator()(const Block* a, const Block* b) const { return a->address < b->address; }
};

struct Pool {
  bool small;
  i64 stream, page;
  std::set<Block*, BySize> cached;
  std::set<Block*, ByAddress> unmapped;
};

inline i64 round_up(i64 size, i64 multiple) { return (size + multiple - 1) / multiple * multiple; }

inline int floor_log2(i64 value) { return 63 - __builtin_clzll(static_cast<unsigned long long>(value)); }

inline i64 round_size(i64 size, const i64* divisions) {
  if (size < kMinBlock) return kMinBlock;
  const i64 count = divisions[std::min(std::max(floor_log2(size) - 20, 0), kRoundupIntervals - 1)];
  if (count > 0 && size > kMinBlock * count) {
    if (count == 1) return size;
    const i64 step = (i64(1) << floor_log2(size)) >> floor_log2(count);
    return round_up(size, step);
  }
  return round_up(size, kMinBlock);
}

inline i64 growable(const Block* block) {
  return block->size + (block->next != nullptr && !block->next->mapped ? block->next->size : 0);
}

}  // namespace zeroplan::allocator
