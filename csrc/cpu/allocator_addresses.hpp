// Chooses the addresses of segments: those of a recorded run while there are any, then the highest free ones.
#pragma once
#include <algorithm>
#include <iterator>
#include <map>

#include "allocator_blocks.hpp"

namespace zeroplan::allocator {

class Addresses {
 public:
  Addresses(const i64* given, i64 count) : given_(given), left_(count) {}

  i64 take(i64 size) {
    if (left_ > 0) {
      --left_;
      return *given_++;
    }
    size = round_up(size, kRoundLarge);
    i64 start;
    auto gap = std::find_if(gaps_.begin(), gaps_.end(),
                            [size](const auto& range) { return range.second - range.first >= size; });
    if (gap != gaps_.end()) {
      start = gap->first;
      const i64 end = gap->second;
      gap = gaps_.erase(gap);
      if (end - start > size) gaps_.emplace_hint(gap, start + size, end);
    } else {
      const i64 end = lowest_;
      start = lowest_ = end - round_up(size, kRegion);
      if (end - start > size) add_gap(start + size, end);
    }
    taken_.emplace(start, size);
    return start;
  }

  void give_back(i64 address) {
    const auto found = taken_.find(address);
    if (found == taken_.end()) return;
    const i64 end = address + found->second;
    taken_.erase(found);
    add_gap(address, end);
  }

 private:
  void add_gap(i64 start, i64 end) {
    auto after = gaps_.lower_bound(start);
    if (after != gaps_.end() && after->first == end) {
      end = after->second;
      after = gaps_.erase(after);
    }
    if (after != gaps_.begin()) {
      const auto before = std::prev(after);
      if (before->second == start) {
        before->second = end;
        return;
      }
    }
    gaps_.emplace_hint(after, start, end);
  }

  const i64* given_;
  i64 left_;
  i64 lowest_ = kRegionsEnd;
  std::map<i64, i64> taken_;  // start: size
  std::map<i64, i64> gaps_;   // start: end
};

}  // namespace zeroplan::allocator
