// CRC-32C (Castagnoli, reflected polynomial 0x82f63b78), by the processor's instruction where it has one.
//
// The instruction takes three cycles and one can begin each cycle, so three neighbouring blocks are summed side by side and
// joined. A checksum is a polynomial over GF(2); n zero bytes behind it multiply it by x^(8n), which is how two are joined.
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "abi.h"
#include "io.hpp"
#include "pool.hpp"

namespace zeroplan {
namespace {

using std::size_t;
using std::uint32_t;
using std::uint64_t;

constexpr uint32_t polynomial = 0x82f63b78u;
constexpr uint32_t one = 0x80000000u; // the polynomial 1; bits are reflected

uint32_t times(uint32_t a, uint32_t b) {
    uint32_t product = 0;
    for (uint32_t bit = one; bit; bit >>= 1) {
        if (a & bit) product ^= b;
        b = (b >> 1) ^ (b & 1 ? polynomial : 0);
    }
    return product;
}

// x^(8 * bytes)
uint32_t power(uint64_t bytes) {
    uint32_t square = one >> 8, result = one; // x^8
    for (; bytes; bytes >>= 1) {
        if (bytes & 1) result = times(result, square);
        square = times(square, square);
    }
    return result;
}

using Table = std::array<std::array<uint32_t, 256>, 8>;

// table[k][b]: the checksum of byte b with k zero bytes behind it.
const Table& byte_table() {
    static const Table table = [] {
        Table made{};
        for (uint32_t b = 0; b < 256; ++b) {
            uint32_t sum = b;
            for (int bit = 0; bit < 8; ++bit) sum = (sum >> 1) ^ (sum & 1 ? polynomial : 0);
            made[0][b] = sum;
        }
        for (size_t k = 1; k < 8; ++k) {
            for (size_t b = 0; b < 256; ++b) made[k][b] = (made[k - 1][b] >> 8) ^ made[0][made[k - 1][b] & 0xff];
        }
        return made;
    }();
    return table;
}

// Sums eight bytes a turn, by tables.
uint32_t plain(uint32_t sum, const unsigned char* p, size_t size) {
    const Table& t = byte_table();
    for (; size >= 8; p += 8, size -= 8) {
        sum ^= p[0] | static_cast<uint32_t>(p[1]) << 8 | static_cast<uint32_t>(p[2]) << 16 | static_cast<uint32_t>(p[3]) << 24;
        sum = t[7][sum & 0xff] ^ t[6][sum >> 8 & 0xff] ^ t[5][sum >> 16 & 0xff] ^ t[4][sum >> 24] ^ t[3][p[4]] ^ t[2][p[5]] ^
              t[1][p[6]] ^ t[0][p[7]];
    }
    for (; size; --size) sum = (sum >> 8) ^ t[0][(sum ^ *p++) & 0xff];
    return sum;
}

#if defined(__x86_64__)
constexpr size_t block = 4096; // bytes of each of the three

// shift[k][b]: the checksum whose byte k is b, with one block of zero bytes behind it.
using Shift = std::array<std::array<uint32_t, 256>, 4>;
const Shift& shift_table() {
    static const Shift table = [] {
        Shift made{};
        const uint32_t factor = power(block);
        for (uint32_t k = 0; k < 4; ++k) {
            for (uint32_t b = 0; b < 256; ++b) made[k][b] = times(b << (8 * k), factor);
        }
        return made;
    }();
    return table;
}

uint64_t word(const unsigned char* p) {
    uint64_t value;
    std::memcpy(&value, p, sizeof value);
    return value;
}

__attribute__((target("sse4.2"))) uint32_t by_instruction(uint32_t sum, const unsigned char* p, size_t size) {
    const Shift& shift = shift_table();
    const auto shifted = [&](uint64_t x) {
        return shift[0][x & 0xff] ^ shift[1][x >> 8 & 0xff] ^ shift[2][x >> 16 & 0xff] ^ shift[3][x >> 24 & 0xff];
    };
    uint64_t a = sum;
    for (; size >= 3 * block; p += 3 * block, size -= 3 * block) {
        uint64_t b = 0, c = 0;
        for (size_t i = 0; i < block; i += 8) {
            a = __builtin_ia32_crc32di(a, word(p + i));
            b = __builtin_ia32_crc32di(b, word(p + block + i));
            c = __builtin_ia32_crc32di(c, word(p + 2 * block + i));
        }
        a = shifted(shifted(a) ^ b) ^ c;
    }
    for (; size >= 8; p += 8, size -= 8) a = __builtin_ia32_crc32di(a, word(p));
    uint32_t rest = static_cast<uint32_t>(a);
    for (; size; --size) rest = __builtin_ia32_crc32qi(rest, *p++);
    return rest;
}
#endif

} // namespace

uint32_t crc32c(uint32_t before, const void* bytes, size_t size) {
    const auto* p = static_cast<const unsigned char*>(bytes);
#if defined(__x86_64__)
    static const bool has_instruction = __builtin_cpu_supports("sse4.2");
    if (has_instruction) return ~by_instruction(~before, p, size);
#endif
    return ~plain(~before, p, size);
}

uint32_t crc32c_join(uint32_t first, uint32_t second, uint64_t second_size) { return times(power(second_size), first) ^ second; }

} // namespace zeroplan

// Returns the CRC-32C of the bytes. Up to `threads` threads compute it; their number does not change it. plain: no instruction.
ZEROPLAN_API std::uint32_t zeroplan_crc32c(const void* bytes, std::int64_t size, int threads, int plain) {
    const auto* p = static_cast<const unsigned char*>(bytes);
    const auto total = static_cast<std::size_t>(size);
    if (plain) return ~zeroplan::plain(~0u, p, total);
    constexpr std::size_t part = std::size_t{1} << 20;
    std::vector<std::uint32_t> sums((total + part - 1) / part);
    const auto size_of = [&](std::size_t i) { return i + 1 < sums.size() ? part : total - i * part; };
    zeroplan::parallel(threads, sums.size(), [&](std::size_t i) { sums[i] = zeroplan::crc32c(0, p + i * part, size_of(i)); });
    std::uint32_t sum = 0;
    for (std::size_t i = 0; i < sums.size(); ++i) sum = zeroplan::crc32c_join(sum, sums[i], size_of(i));
    return sum;
}
