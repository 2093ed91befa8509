// The arguments of momentum in one bit an element; zeroplan/core/one_bit.py, Note [Messages], says how a message is laid out.
#pragma once

#include <cstdint>

extern "C" {

// A flat of ranks * shard elements, or one chunk of it, and `ranks` messages of `words` words.
struct ZeroplanSigns {
    const float* momentum; // [ranks * shard]; null where only messages are read
    const void* grad;      // [ranks * shard]
    float* error;          // what compression leaves out, of the elements that are compressed
    std::uint32_t* messages;
    std::int64_t shard; // elements of a chunk, a multiple of 64
    std::int64_t words;
    std::int32_t ranks;
    std::int32_t grad_type;
    float factor; // multiplies the gradient
    float beta1, one_minus_beta1;
    std::int32_t skip; // leave the error as it is
};
}
