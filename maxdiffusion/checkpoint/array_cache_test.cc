#include "maxdiffusion/checkpoint/array_cache.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <thread>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/files.h"
#include "maxdiffusion/base/host_array_rows.h"
#include "maxdiffusion/base/temporary_folder.h"
#include "maxdiffusion/checkpoint/safetensors.h"

namespace md {
namespace {

namespace fs = std::filesystem;

std::string item(int i) { return content_hash(std::to_string(i)); }
std::vector<std::string> items(int begin, int end) {
  std::vector<std::string> all;
  for (int i = begin; i < end; ++i) all.push_back(item(i));
  return all;
}
// latent [n, 2] = (i, i/2), text [n, 3] = 100 i + column
HostArrays encode(int begin, int end) {
  std::vector<float> latent;
  std::vector<int32_t> text;
  for (int i = begin; i < end; ++i) {
    latent.insert(latent.end(), {static_cast<float>(i), static_cast<float>(i) / 2});
    for (int32_t c = 0; c < 3; ++c) text.push_back(i * 100 + c);
  }
  const int64_t n = end - begin;
  return {{"latent", HostArray::of<float>(Shape{DType::f32, {n, 2}}, latent)},
          {"text", HostArray::of<int32_t>(Shape{DType::s32, {n, 3}}, text)}};
}
/// The numbers below `end` whose arrays are found; all of those have the right values.
std::vector<int> found_in(const ArrayCache& cache, int end) {
  std::vector<int> all;
  const HostArrays expected = encode(0, end);
  for (int i = 0; i < end; ++i) {
    const auto place = cache.find(item(i));
    if (!place) continue;
    all.push_back(i);
    const HostArrays found = cache.read(*place);
    EXPECT_EQ(found.size(), 2u);
    for (const auto& [name, of_all] : expected) {
      const HostArray row = row_of(of_all, i);
      EXPECT_EQ(found.at(name).shape(), row.shape());
      EXPECT_EQ(std::memcmp(found.at(name).data(), row.data(), row.bytes()), 0) << name << " " << i;
    }
  }
  return all;
}
ArrayCache opened(const std::string& folder, int end, const std::string& key = "key") {
  ArrayCache cache(folder, "images", key);
  cache.open(items(0, end));
  return cache;
}
std::vector<std::string> parts_of(const std::string& folder) {
  std::vector<std::string> files;
  for (const auto& e : fs::recursive_directory_iterator(folder))
    if (e.path().extension() == ".safetensors") files.push_back(e.path());
  std::ranges::sort(files);
  return files;
}

// S0-93
TEST(ArrayCache, ResumesWhereItWasInterrupted) {
  const TemporaryFolder t;
  {
    ArrayCache cache = opened(t.path(), 9);
    EXPECT_EQ(found_in(cache, 9), (std::vector<int>{}));
    cache.put(items(0, 3), encode(0, 3));
    cache.put(items(5, 6), encode(5, 6));
    EXPECT_EQ(found_in(cache, 9), (std::vector<int>{0, 1, 2, 5}));
  }
  ArrayCache cache = opened(t.path(), 9);
  EXPECT_EQ(found_in(cache, 9), (std::vector<int>{0, 1, 2, 5}));
  cache.put(items(3, 5), encode(3, 5));
  EXPECT_EQ(found_in(cache, 9), (std::vector<int>{0, 1, 2, 3, 4, 5}));
  // Only items that were requested are opened.
  ArrayCache others(t.path(), "images", "key");
  others.open({item(4)});
  EXPECT_EQ(found_in(others, 9), (std::vector<int>{3, 4}));
}

// S0-93
TEST(ArrayCache, AnotherKeyOrKindIsAnotherCache) {
  const TemporaryFolder t;
  ArrayCache cache(t.path(), "images", "vae B");
  cache.put(items(0, 4), encode(0, 4));
  EXPECT_EQ(found_in(opened(t.path(), 4, "vae B"), 4).size(), 4u);
  EXPECT_EQ(found_in(opened(t.path(), 4, "vae C"), 4).size(), 0u);
  ArrayCache texts(t.path(), "texts", "vae B");
  texts.open(items(0, 4));
  EXPECT_EQ(found_in(texts, 4).size(), 0u);
  EXPECT_EQ(read_file(cache.path() + "/key.txt"), "latent cache 3\nvae B\n");
}

// S0-93
TEST(ArrayCache, DamagedPartsAreMadeAgain) {
  const TemporaryFolder t;
  ArrayCache cache(t.path(), "images", "key");
  for (int i = 0; i < 20; i += 5) cache.put(items(i, i + 5), encode(i, i + 5));
  std::vector<std::string> files = parts_of(t.path());
  ASSERT_EQ(files.size(), 4u);
  fs::resize_file(files[0], fs::file_size(files[0]) - 1);
  std::ofstream(files[1]) << "";
  std::string flipped = read_file(files[2]);
  flipped[flipped.size() - 3] ^= 1;  // one bit of an array
  write_file_atomic(files[2], flipped);
  testing::internal::CaptureStderr();
  ArrayCache again = opened(t.path(), 20);
  const std::string log = testing::internal::GetCapturedStderr();
  EXPECT_NE(log.find(files[2] + " is recomputed: its checksum differs from the one that was written"),
            std::string::npos)
      << log;
  EXPECT_NE(log.find(files[0] + " is not used: "), std::string::npos) << log;
  EXPECT_NE(log.find(files[1] + " is not used: "), std::string::npos) << log;
  EXPECT_EQ(found_in(again, 20).size(), 5u);
  for (int i = 0; i < 20; i += 5)
    if (!again.find(item(i))) again.put(items(i, i + 5), encode(i, i + 5));
  EXPECT_EQ(found_in(again, 20).size(), 20u);
  EXPECT_EQ(found_in(opened(t.path(), 20), 20).size(), 20u);
  EXPECT_EQ(parts_of(t.path()), files);  // rewritten under their names
}

TEST(ArrayCache, AFailedWriteLeavesItsItemsMissing) {
  const TemporaryFolder t;
  ArrayCache cache = opened(t.path(), 10);
  cache.put(items(0, 5), encode(0, 5));
  set_write_hook([](const std::string& path, size_t) { fail(Code::io, "write '{}': No space left on device", path); });
  EXPECT_THROW(cache.put(items(5, 10), encode(5, 10)), Error);
  set_write_hook(nullptr);
  EXPECT_EQ(found_in(cache, 10).size(), 5u);
  EXPECT_EQ(found_in(opened(t.path(), 10), 10).size(), 5u);
  cache.put(items(5, 10), encode(5, 10));
  EXPECT_EQ(found_in(cache, 10).size(), 10u);
}

TEST(ArrayCache, PartsOfWrongSizeAreRefused) {
  const TemporaryFolder t;
  ArrayCache cache(t.path(), "images", "key");
  EXPECT_THROW(cache.put(items(0, 5), encode(0, 4)), Error);
  EXPECT_THROW(cache.put(items(0, 5), {}), Error);
  EXPECT_THROW(cache.put({}, encode(0, 0)), Error);
  EXPECT_EQ(parts_of(t.path()).size(), 0u);
}

TEST(ArrayCache, TakesWhatSeveralWriteAtTheSameTime) {
  const TemporaryFolder t;
  std::vector<std::thread> writers;
  for (int w = 0; w < 4; ++w)
    writers.emplace_back([&, w] {
      ArrayCache cache(t.path(), "images", "key");
      for (int i = 0; i < 10; ++i) {
        cache.put(items(i, i + 2), encode(i, i + 2));  // the same as the others
        cache.put({item(100 * w + 50 + i)}, encode(100 * w + 50 + i, 100 * w + 51 + i));
      }
    });
  for (std::thread& w : writers) w.join();
  EXPECT_EQ(found_in(opened(t.path(), 500), 500).size(), 11u + 40u);
}

TEST(ArrayCache, WhatIsNotUsedIsCountedAndRemoved) {
  const TemporaryFolder t;
  ArrayCache images(t.path(), "images", "key"), texts(t.path(), "texts", "key");
  images.put(items(0, 4), encode(0, 4));
  images.put(items(4, 6), encode(4, 6));
  texts.put(items(0, 3), encode(0, 3));
  make_folders(t / "0123");  // of an earlier version
  write_file_atomic(t / "0123/key.txt", "latent cache 2: 2 samples in parts of 2\n");
  write_safetensors(t / "0123/part-00001-of-00001.safetensors", encode(0, 4), {{"samples", "[0, 4)"}});
  make_folders(t / "mine");  // of somebody else
  write_file_atomic(t / "mine/part-1.safetensors", "x");
  std::unordered_set<std::string> used;
  for (const int i : {0, 2, 3}) used.insert(images.name() + "/" + item(i));
  for (const bool remove : {false, true}) {
    const CachedItems found = unused_items(t.path(), used, remove);
    EXPECT_EQ(found.all, 6 + 3 + 4);
    EXPECT_EQ(found.unused, 3 + 3 + 4);
    EXPECT_GT(found.unused_bytes, 0);
  }
  EXPECT_TRUE(exists(t / "mine/part-1.safetensors"));
  EXPECT_FALSE(exists(t / "0123"));
  EXPECT_FALSE(exists(texts.path()));
  EXPECT_EQ(found_in(opened(t.path(), 6), 6), (std::vector<int>{0, 2, 3}));
  const CachedItems rest = unused_items(t.path(), used);
  EXPECT_EQ(rest.all, 3);
  EXPECT_EQ(rest.unused, 0);
}

}  // namespace
}  // namespace md
