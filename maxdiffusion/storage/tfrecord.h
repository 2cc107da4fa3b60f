// The framing of TFRecord files: length (u64), masked checksum of it, bytes, masked checksum of them; little endian.
// Source: TensorFlow's record_writer.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace md {

constexpr size_t kTfrecordHead = 12, kTfrecordFoot = 4;  // bytes before and after a record's

/// CRC-32C (Castagnoli).
uint32_t crc32c(std::string_view bytes);
/// CRC-32C rotated and shifted, so that checksums of data with embedded checksums stay strong.
uint32_t masked_crc32c(std::string_view bytes);
/// Adds one record with its frame to `file`.
void append_tfrecord(std::string& file, std::string_view record);

}  // namespace md
