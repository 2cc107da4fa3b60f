#include "maxdiffusion/checkpoint/array_cache.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <fstream>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/files.h"
#include "maxdiffusion/base/host_array_rows.h"
#include "maxdiffusion/base/temporary_folder.h"

namespace md {
namespace {

namespace fs = std::filesystem;

// Deleted at program exit.
const TemporaryFolder& root() {
  static const TemporaryFolder folder;
  return folder;
}
std::string fresh(const std::string& name) {
  std::string folder = root() / name;
  fs::remove_all(folder);
  return folder;
}
// latent [n, 2] = (i, i/2), text [n, 3] = 100 i + column
HostArrays encode(int64_t begin, int64_t end) {
  std::vector<float> latent;
  std::vector<int32_t> text;
  for (int64_t i = begin; i < end; ++i) {
    latent.insert(latent.end(), {static_cast<float>(i), static_cast<float>(i) / 2});
    for (int32_t c = 0; c < 3; ++c) text.push_back(static_cast<int32_t>(i) * 100 + c);
  }
  const int64_t n = end - begin;
  return {{"latent", HostArray::of<float>(Shape{DType::f32, {n, 2}}, latent)},
          {"text", HostArray::of<int32_t>(Shape{DType::s32, {n, 3}}, text)}};
}
void expect_all(const ArrayCache& cache, int64_t n) {
  ASSERT_EQ(cache.size(), n);
  const HostArrays expected = encode(0, n);
  for (int64_t i = 0; i < n; ++i) {
    const HostArrays found = cache.read(i);
    ASSERT_EQ(found.size(), 2u);
    for (const auto& [name, all] : expected) {
      const HostArray row = row_of(all, i);
      ASSERT_EQ(found.at(name).shape(), row.shape());
      EXPECT_EQ(std::memcmp(found.at(name).data(), row.data(), row.bytes()), 0) << name;
    }
  }
}
int64_t fill(ArrayCache& cache, int64_t at_most = 1000) {
  int64_t made = 0;
  for (; made < at_most; ++made) {
    const auto part = cache.next_missing();
    if (!part) break;
    cache.put(*part, encode(part->begin, part->end));
  }
  return made;
}

// S0-93
TEST(ArrayCache, ResumesWhereItWasInterrupted) {
  const std::string folder = fresh("resume");
  {
    ArrayCache cache(folder, "key", 23, 5);
    EXPECT_EQ(cache.parts(), 5);
    EXPECT_FALSE(cache.complete());
    EXPECT_EQ(fill(cache, 2), 2);
    EXPECT_THROW(cache.size(), Error);
  }
  ArrayCache cache(folder, "key", 23, 5);
  EXPECT_EQ(cache.parts_present(), 2);
  EXPECT_EQ(cache.next_missing()->begin, 10);
  ASSERT_EQ(cache.missing().size(), 3U);
  for (size_t i = 0; i < 3; ++i) EXPECT_EQ(cache.missing()[i].begin, 10 + 5 * static_cast<int64_t>(i));
  EXPECT_EQ(fill(cache), 3);
  EXPECT_TRUE(cache.complete());
  expect_all(cache, 23);
  EXPECT_TRUE(ArrayCache(folder, "key", 23, 5).complete());
}

// S0-93
TEST(ArrayCache, AnotherKeyOrSizeIsAnotherCache) {
  const std::string folder = fresh("keys");
  ArrayCache cache(folder, "dataset A, vae B", 8, 4);
  fill(cache);
  EXPECT_EQ(ArrayCache(folder, "dataset A, vae C", 8, 4).parts_present(), 0);
  EXPECT_EQ(ArrayCache(folder, "dataset A, vae B", 9, 4).parts_present(), 0);
  EXPECT_EQ(ArrayCache(folder, "dataset A, vae B", 8, 2).parts_present(), 0);
  EXPECT_NE(read_file(cache.path() + "/key.txt").find("dataset A, vae B"), std::string::npos);
}

// S0-93
TEST(ArrayCache, DamagedPartsAreMadeAgain) {
  const std::string folder = fresh("damaged");
  ArrayCache cache(folder, "key", 25, 5);
  fill(cache);
  std::vector<std::string> files;
  for (const auto& e : fs::directory_iterator(cache.path())) {
    if (e.path().extension() == ".safetensors") files.push_back(e.path());
  }
  std::ranges::sort(files);
  ASSERT_EQ(files.size(), 5u);
  fs::resize_file(files[1], fs::file_size(files[1]) - 1);
  std::ofstream(files[2]) << "";
  fs::copy_file(files[0], files[3], fs::copy_options::overwrite_existing);  // the samples of another part
  std::string flipped = read_file(files[4]);
  flipped[flipped.size() - 3] ^= 1;  // one bit of an array
  write_file_atomic(files[4], flipped);
  testing::internal::CaptureStderr();
  ArrayCache again(folder, "key", 25, 5);
  const std::string log = testing::internal::GetCapturedStderr();
  EXPECT_NE(log.find(files[4] + " is recomputed: its checksum differs from the one that was written"),
            std::string::npos)
      << log;
  EXPECT_EQ(again.parts_present(), 1);
  EXPECT_EQ(again.samples_present(), 5);
  EXPECT_EQ(fill(again), 4);
  expect_all(again, 25);
}

TEST(ArrayCache, AFailedWriteLeavesThePartMissing) {
  const std::string folder = fresh("full_disk");
  ArrayCache cache(folder, "key", 10, 5);
  fill(cache, 1);
  set_write_hook([](const std::string& path, size_t) { fail(Code::io, "write '{}': No space left on device", path); });
  EXPECT_THROW(fill(cache, 1), Error);
  set_write_hook(nullptr);
  EXPECT_EQ(cache.parts_present(), 1);
  EXPECT_EQ(ArrayCache(folder, "key", 10, 5).parts_present(), 1);
  fill(cache);
  expect_all(cache, 10);
}

TEST(ArrayCache, PartsOfWrongSizeAreRefused) {
  ArrayCache cache(fresh("wrong"), "key", 10, 5);
  EXPECT_THROW(cache.put(*cache.next_missing(), encode(0, 4)), Error);
  EXPECT_THROW(cache.put(*cache.next_missing(), {}), Error);
  EXPECT_THROW(cache.put({7, 35, 40}, encode(35, 40)), Error);
  cache.put(*cache.next_missing(), encode(0, 5));
  auto other = encode(5, 10);
  other.erase("text");
  EXPECT_THROW(cache.put(*cache.next_missing(), other), Error);
}

TEST(ArrayCache, SamplesThatAreLeftOutAreNamedAndNotCounted) {
  const std::string folder = fresh("left_out");
  {
    ArrayCache cache(folder, "key", 12, 4);
    HostArrays two = encode(0, 2);
    EXPECT_THROW(cache.put(*cache.next_missing(), two, {"a: torn"}), Error);
    cache.put(*cache.next_missing(), two, {"a: torn", "b: in two\nlines"});
    cache.put(*cache.next_missing(), {}, {"c", "d", "e", "f"});
    cache.put(*cache.next_missing(), encode(2, 6));
  }
  const ArrayCache cache(folder, "key", 12, 4);
  expect_all(cache, 6);
  EXPECT_EQ(cache.left_out(), (std::vector<std::string>{"a: torn", "b: in two lines", "c", "d", "e", "f"}));
  std::vector<int64_t> parts;
  cache.each_part("latent", [&](const HostArray& a) { parts.push_back(a.dims()[0]); });
  EXPECT_EQ(parts, (std::vector<int64_t>{2, 4}));
  EXPECT_THROW((void)cache.read(6), Error);
}

}  // namespace
}  // namespace md
