// Blocks, pools and the rounding of sizes: the twin of zeroplan/simulate/allocator/segments.py.
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

// The free blocks of a pool in order of size, then address. They lie in sorted bins, eight to a power of two. A pool caches a
// few hundred blocks, so a bin holds few, and moving them costs less than the nodes of a tree would.
class FreeBlocks {
 public:
  struct Row {
    i64 size, address;
    Block* block;
  };
  // A position in that order. `bin` is kBins at the end.
  struct Place {
    int bin;
    std::size_t row;
    bool operator==(const Place& other) const { return bin == other.bin && row == other.row; }
  };

  const Row& operator[](Place at) const { return bins_[at.bin][at.row]; }
  Place begin() const { return {next_bin(0), 0}; }
  Place end() const { return {kBins, 0}; }
  Place after(Place at) const {
    return at.row + 1 < bins_[at.bin].size() ? Place{at.bin, at.row + 1} : Place{next_bin(at.bin + 1), 0};
  }
  i64 largest() const {
    for (int word = kWords - 1; word >= 0; --word)
      if (filled_[word] != 0) return bins_[64 * word + 63 - __builtin_clzll(filled_[word])].back().size;
    return 0;
  }
  std::vector<Row> rows() const {
    std::vector<Row> found;
    for (Place at = begin(); !(at == end()); at = after(at)) found.push_back((*this)[at]);
    return found;
  }

  // Finds the smallest block of at least so many bytes; among equals the one with the lowest address.
  Place lower_bound(i64 size) const {
    const int bin = bin_of(size);
    const std::size_t row = place_in(bins_[bin], size, INT64_MIN);
    return row < bins_[bin].size() ? Place{bin, row} : Place{next_bin(bin + 1), 0};
  }

  void insert(Block* block) {
    const int bin = bin_of(block->size);
    auto& rows = bins_[bin];
    rows.insert(rows.begin() + place_in(rows, block->size, block->address), {block->size, block->address, block});
    filled_[bin / 64] |= std::uint64_t(1) << bin % 64;
  }
  void erase(const Block* block) {
    const int bin = bin_of(block->size);
    erase({bin, place_in(bins_[bin], block->size, block->address)});
  }
  void erase(Place at) {
    auto& rows = bins_[at.bin];
    rows.erase(rows.begin() + at.row);
    if (rows.empty()) filled_[at.bin / 64] &= ~(std::uint64_t(1) << at.bin % 64);
  }

 private:
  static constexpr int kWords = 8, kBins = 64 * kWords;

  static int bin_of(i64 size) {
    const int power = 63 - __builtin_clzll(static_cast<unsigned long long>(size) | 8);
    return 8 * power + static_cast<int>(size >> (power - 3) & 7);
  }

  static std::size_t place_in(const std::vector<Row>& rows, i64 size, i64 address) {
    const auto below = [=](const Row& row) { return row.size < size || (row.size == size && row.address < address); };
    return std::partition_point(rows.begin(), rows.end(), below) - rows.begin();
  }

  int next_bin(int bin) const {
    if (bin >= kBins) return kBins;
    int word = bin / 64;
    std::uint64_t left = filled_[word] >> bin % 64 << bin % 64;
    while (left == 0) {
      if (++word == kWords) return kBins;
      left = filled_[word];
    }
    return 64 * word + __builtin_ctzll(left);
  }

  std::vector<Row> bins_[kBins];
  std::uint64_t filled_[kWords] = {};
};

struct ByAddress {
  bool operator()(const Block* a, const Block* b) const { return a->address < b->address; }
};

struct Pool {
  bool small;
  i64 stream, page;
  FreeBlocks cached;
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
