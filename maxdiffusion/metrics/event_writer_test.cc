#include "maxdiffusion/metrics/event_writer.h"

#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <thread>

#include "maxdiffusion/base/files.h"
#include "maxdiffusion/base/temporary_folder.h"
#include "maxdiffusion/base/version.h"

namespace md {
namespace {

/// CRC-32C bit by bit: a slow reference implementation.
uint32_t crc32c(std::string_view bytes) {
  uint32_t c = ~0u;
  for (unsigned char b : bytes) {
    c ^= b;
    for (int k = 0; k < 8; ++k) c = (c >> 1) ^ (0x82F63B78u & (0 - (c & 1)));
  }
  return ~c;
}

uint32_t masked(std::string_view bytes) {
  uint32_t c = crc32c(bytes);
  return ((c >> 15) | (c << 17)) + 0xa282ead8u;
}

/// Messages of the only file in `folder`; verifies every checksum.
std::vector<std::string> records(const std::string& folder) {
  std::vector<std::string> files, out;
  for (const auto& f : std::filesystem::directory_iterator(folder)) files.push_back(f.path());
  EXPECT_EQ(files.size(), 1u);
  const std::string bytes = read_file(files.at(0));
  for (size_t at = 0; at < bytes.size();) {
    uint64_t n = 0;
    uint32_t crc = 0;
    std::memcpy(&n, &bytes[at], 8);
    std::memcpy(&crc, &bytes[at + 8], 4);
    EXPECT_EQ(crc, masked(std::string_view(bytes).substr(at, 8)));
    out.push_back(bytes.substr(at + 12, n));
    std::memcpy(&crc, &bytes[at + 12 + n], 4);
    EXPECT_EQ(crc, masked(out.back()));
    at += 12 + n + 4;
  }
  return out;
}

bool has(const std::string& text, std::string_view part) { return text.find(part) != std::string::npos; }

TEST(EventWriter, ChecksumIsCastagnolis) { EXPECT_EQ(crc32c("123456789"), 0xE3069283u); }

TEST(EventWriter, WritesFramedEvents) {
  TemporaryFolder t;
  {
    EventWriter w(t / "tb");
    w.scalar("learning/loss", 1.5, 7);
    w.text("config", "a | b", 0);
    HostArray rgb(Shape{DType::u8, {4, 6, 3}});
    std::memset(rgb.mutable_data(), 200, rgb.bytes());
    w.image("samples", rgb, 7);
    w.video("clip", rgb.reshaped({2, 2, 6, 3}), 8, 7);
  }
  auto r = records(t / "tb");
  ASSERT_EQ(r.size(), 6u);
  EXPECT_TRUE(has(r[0], "brain.Event:2"));
  EXPECT_TRUE(has(r[1], "maxdiffusion_version") && has(r[1], version()));
  r.erase(r.begin() + 1);
  EXPECT_TRUE(has(r[1], "learning/loss"));
  const char fifteen[] = {0x15, 0x00, 0x00, char(0xc0), 0x3f};  // field 2, 32 bits: 1.5f
  EXPECT_TRUE(has(r[1], std::string_view(fifteen, 5)));
  const char step[] = {0x10, 0x07};  // field 2, varint
  EXPECT_TRUE(has(r[1], std::string_view(step, 2)));
  EXPECT_TRUE(has(r[2], "a | b") && has(r[2], "text"));
  EXPECT_TRUE(has(r[3], "PNG"));
  const char clip[] = {0x08, 0x02, 0x10, 0x06};  // fields of an image: height 2, width 6
  EXPECT_TRUE(has(r[4], "clip") && has(r[4], "GIF89a") && has(r[4], std::string_view(clip, 4)));
}

TEST(EventWriter, ThreadsDoNotMixTheirRecords) {
  TemporaryFolder t;
  {
    EventWriter w(t / "tb");
    std::vector<std::jthread> threads;
    for (int k = 0; k < 4; ++k)
      threads.emplace_back([&w, k] {
        for (int i = 0; i < 500; ++i) w.scalar("x/" + std::to_string(k), i, i);
      });
    for (auto& th : threads) th.join();
  }
  EXPECT_EQ(records(t / "tb").size(), 2u + 4 * 500);
}

}  // namespace
}  // namespace md
