#include "maxdiffusion/run/encode_dataset.h"

#include <gtest/gtest.h>
#include <malloc.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <set>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/files.h"
#include "maxdiffusion/base/host_array_rows.h"
#include "maxdiffusion/base/temporary_folder.h"
#include "maxdiffusion/data/records/file_hashes.h"
#include "maxdiffusion/data/records/open_source.h"
#include "maxdiffusion/media/decode_image.h"
#include "maxdiffusion/media/image.h"

namespace md {
namespace {

namespace fs = std::filesystem;

std::shared_ptr<const RecordSource> synthetic(int64_t samples) {
  return open_source({.dataset_type = "synthetic", .synthetic_num_samples = samples, .resolution = 8});
}
/// A fake encoder: `floats` values for each image, which start with its pixels.
HostArrays made(const LoadedImages& loaded, int64_t floats = 16) {
  const int64_t n = loaded.pixels.dims()[0];
  auto of = [&](const HostArray& pixels) {
    HostArray out = zeros_like(HostArray(Shape{DType::f32, {n, floats}}));
    auto v = out.mutable_view<float>();
    const auto p = pixels.view<uint8_t>();
    for (int64_t i = 0; i < n; ++i)
      for (int64_t k = 0; k < std::min<int64_t>(floats, 24); ++k)
        v[static_cast<size_t>(i * floats + k)] = p[static_cast<size_t>(i * 8 * 8 * 3 + k)];
    return out;
  };
  return {{"moments", of(loaded.pixels)}, {"mirrored.moments", of(mirrored(loaded.pixels))}};
}
LoadedImages with_pixels(const HostArray& pixels) {
  LoadedImages loaded;
  loaded.pixels = pixels;
  return loaded;
}
CachedImages cached(const std::string& folder, const std::shared_ptr<const RecordSource>& source, int64_t together,
                    const std::function<HostArrays(const LoadedImages&)>& encode,
                    const ImageConfig& config = {.resolution = 8}, const std::string& key = "key") {
  FileHashes hashes("");
  return cache_images(sort_into_aspect_buckets(source, config, true, &hashes), config,
                      {{folder, ""}, key, "arrays", together},
                      [&](const LoadedImages& loaded, const Encoded&) { return encode(loaded); });
}
bool same(const HostArray& a, const HostArray& b) {
  return a.shape() == b.shape() && std::memcmp(a.data(), b.data(), a.bytes()) == 0;
}

// S0-93
TEST(CacheImages, ResumesWhereItWasKilledAndEncodesNothingTwice) {
  const TemporaryFolder t;
  int64_t seen = 0;
  auto counting = [&](const LoadedImages& loaded) {
    if ((seen += std::ssize(loaded.names)) > 20) fail(Code::internal, "killed");
    return made(loaded);
  };
  EXPECT_THROW(cached(t / "cache", synthetic(25), 5, counting), Error);
  seen = -1000;
  const CachedImages whole = cached(t / "cache", synthetic(25), 5, counting);
  EXPECT_EQ(seen, -995);  // the last part
  ASSERT_EQ(whole.images, 25);
  seen = 0;
  EXPECT_EQ(cached(t / "cache", synthetic(25), 5, counting).images, 25);
  EXPECT_EQ(seen, 0);
  seen = -1000;  // other models use another cache
  EXPECT_EQ(cached(t / "cache", synthetic(25), 5, counting, {.resolution = 8}, "other").images, 25);
  EXPECT_EQ(seen, -975);
  const HostArrays all = made(load_images(synthetic(25), {.resolution = 8}));
  for (int64_t i = 0; i < 25; ++i)
    ASSERT_TRUE(same(whole.buckets[0]->read(i).at("moments"), row_of(all.at("moments"), i))) << i;
}

TEST(CacheImages, NamesSkipsAndCountsWhatDoesNotDecodeEveryTime) {
  const TemporaryFolder t;
  make_folders(t / "pictures");
  for (int i = 0; i < 5; ++i) {
    HostArray rgb(Shape{DType::u8, {8, 8, 3}});
    std::ranges::fill(rgb.mutable_view<uint8_t>(), static_cast<uint8_t>(40 * i));
    write_png(t / fmt::format("pictures/{}.png", i), rgb);
  }
  write_file_atomic(t / "pictures/2.png", "no image");
  for (int again = 0; again < 2; ++again) {
    testing::internal::CaptureStderr();
    const CachedImages all =
        cached(t / "cache", open_source({.train_data_dir = t / "pictures"}), 2, [](const auto& l) { return made(l); });
    const std::string log = testing::internal::GetCapturedStderr();
    EXPECT_EQ(all.images, 4);
    EXPECT_EQ(all.skipped, 1);
    EXPECT_EQ(all.buckets[0]->read(2).at("moments").view<float>()[0], 120);
    EXPECT_NE(log.find("skipped " + (t / "pictures/2.png")), std::string::npos) << log;
    EXPECT_NE(log.find("1 of 5 images cannot be decoded and are skipped"), std::string::npos) << log;
  }
  for (int i = 0; i < 5; ++i) write_file_atomic(t / fmt::format("pictures/{}.png", i), "no image");
  try {
    cached(t / "cache", open_source({.train_data_dir = t / "pictures"}), 2, [](const auto& l) { return made(l); });
    FAIL() << "no image is one";
  } catch (const Error& e) {
    EXPECT_NE(std::string(e.what()).find("none of 5 images can be decoded; the first: "), std::string::npos)
        << e.what();
  }
}

TEST(CacheImages, EncodesWhatIsReadAndReadsTheNextImageInsteadOfADamagedOne) {
  const TemporaryFolder t;
  make_folders(t / "pictures");
  for (int i = 0; i < 6; ++i) {
    HostArray rgb(Shape{DType::u8, {8, 8, 3}});
    std::ranges::fill(rgb.mutable_view<uint8_t>(), static_cast<uint8_t>(40 * i));
    write_png(t / fmt::format("pictures/{}.png", i), rgb);
  }
  for (const int damaged : {2, 5}) write_file_atomic(t / fmt::format("pictures/{}.png", damaged), "no image");
  int64_t seen = 0;
  const auto cached_if_read = [&](const std::vector<bool>& read) {
    FileHashes hashes("");
    const ImageConfig config = {.resolution = 8};
    CacheConfig cache{{t / "cache", ""}, "key", "arrays", 2};
    cache.read = [&](const std::vector<std::vector<int64_t>>& records) {
      EXPECT_EQ(records, (std::vector<std::vector<int64_t>>{{0, 1, 2, 3, 4, 5}}));
      return std::vector<std::vector<bool>>{read};
    };
    return cache_images(
        sort_into_aspect_buckets(open_source({.train_data_dir = t / "pictures"}), config, true, &hashes), config, cache,
        [&](const LoadedImages& loaded, const Encoded&) {
          seen += std::ssize(loaded.names);
          return made(loaded);
        });
  };
  const auto level = [](const CachedImages& of, int64_t i) {
    return of.buckets.at(0)->read(i).at("moments").view<float>()[0];
  };
  const CachedImages some = cached_if_read({false, false, true, false, true, false});
  EXPECT_EQ(seen, 2);  // 3 instead of 2, and 4
  EXPECT_EQ(some.images, 5);
  EXPECT_EQ(some.skipped, 1);
  ASSERT_EQ(some.buckets.at(0)->size(), 6);
  EXPECT_EQ(level(some, 2), 120);
  EXPECT_EQ(level(some, 4), 160);
  for (const int64_t unread : {0, 1, 5}) EXPECT_THROW(some.buckets[0]->read(unread), Error) << unread;
  const CachedImages all = cached_if_read({true, true, true, true, true, true});
  EXPECT_EQ(seen, 4);
  EXPECT_EQ(all.images, 4);
  EXPECT_EQ(all.skipped, 2);
  const std::vector<float> expected = {0, 40, 120, 120, 160, 0};  // after the last the first
  for (int64_t i = 0; i < 6; ++i) EXPECT_EQ(level(all, i), expected[static_cast<size_t>(i)]) << i;
}

/// A folder of images with captions, and a cache of them: counts what is encoded, and compares what is cached with what
/// the images and captions are.
class ItemCache : public testing::Test {
 protected:
  void write(const std::string& name, int level, const std::string& caption) {
    make_folders(t / "data");
    HostArray rgb(Shape{DType::u8, {8, 8, 3}});
    std::ranges::fill(rgb.mutable_view<uint8_t>(), static_cast<uint8_t>(level));
    write_png(t / ("data/" + name + ".png"), rgb);
    write_file_atomic(t / ("data/" + name + ".txt"), caption);
  }
  struct Encoded {
    int64_t images = 0, captions = 0;
    bool operator==(const Encoded&) const = default;
  };
  /// Opens the cache and returns what was encoded for it.
  Encoded open(const ImageConfig& config = {.resolution = 8}, const std::string& folder = "data",
               const std::string& run = "") {
    Encoded out;
    FileHashes hashes(t / "hashes.txt");
    const auto source = open_source({.train_data_dir = t / folder});
    const CachedCaptions captions{.key = "encoder", .encode = [&](const std::vector<std::string>& texts) {
                                    out.captions += std::ssize(texts);
                                    HostArray lengths(Shape{DType::s32, {std::ssize(texts), 2}});
                                    auto v = lengths.mutable_view<int32_t>();
                                    for (size_t i = 0; i < texts.size(); ++i)
                                      v[2 * i] = static_cast<int32_t>(texts[i].size()), v[2 * i + 1] = texts[i][0];
                                    return HostArrays{{"text", lengths}};
                                  }};
    const CachedImages all = cache_images(
        sort_into_aspect_buckets(source, config, true, &hashes), config, {{t / "cache", run}, "vae", "arrays", 4},
        [&](const LoadedImages& loaded, const auto&) {
          out.images += std::ssize(loaded.names);
          return made(loaded);
        },
        &captions);
    hashes.save();
    files_read = hashes.computed();
    EXPECT_EQ(all.images, source->size());
    for (int64_t i = 0; i < all.images; ++i) {
      const Record r = source->read(all.buckets[0]->record(i));
      const HostArrays found = all.buckets[0]->read(i);
      const HostArray rgb = decode_image_bytes(r.image.bytes.data(), r.image.bytes.size(), r.name);
      EXPECT_EQ(found.at("moments").view<float>()[0], rgb.view<uint8_t>()[0]) << r.name;
      EXPECT_EQ(found.at("text").view<int32_t>()[0], static_cast<int32_t>(r.caption.size())) << r.name;
      EXPECT_EQ(found.at("text").view<int32_t>()[1], r.caption[0]) << r.name;
    }
    return out;
  }
  TemporaryFolder t;
  int64_t files_read = 0;
};

// S0-93
TEST_F(ItemCache, EncodesOnlyWhatChanged) {
  for (int i = 0; i < 6; ++i) write(std::to_string(i), 10 * i, std::string(static_cast<size_t>(i) + 1, 'a'));
  EXPECT_EQ(open(), (Encoded{6, 6}));
  EXPECT_EQ(files_read, 6);
  EXPECT_EQ(open(), Encoded());
  EXPECT_EQ(files_read, 0);
  write("6", 60, "new");  // added
  EXPECT_EQ(open(), (Encoded{1, 1}));
  EXPECT_EQ(files_read, 1);
  for (const char* file : {"data/2.png", "data/2.txt"}) fs::remove(t / file);
  EXPECT_EQ(open(), Encoded());
  // A caption of the same size, in a file of the same time.
  const auto time = fs::last_write_time(t / "data/3.txt");
  write_file_atomic(t / "data/3.txt", "bbbb");
  fs::last_write_time(t / "data/3.txt", time);
  EXPECT_EQ(open(), (Encoded{0, 1}));
  EXPECT_EQ(files_read, 0);
  write_file_atomic(t / "data/3.txt", "aaaa");  // as before
  EXPECT_EQ(open(), Encoded());
  write("4", 77, "aaaaa");  // another image
  EXPECT_EQ(open(), (Encoded{1, 0}));
  // Another image of the same size, in a file of the same time, as archives with fixed times have.
  const std::string image = t / "data/4.png";
  const auto size = fs::file_size(image);
  const auto image_time = fs::last_write_time(image);
  write("4", 78, "aaaaa");
  fs::last_write_time(image, image_time);
  ASSERT_EQ(fs::file_size(image), size);
  EXPECT_EQ(open(), (Encoded{1, 0}));
  write("2", 20, "aaa");  // the one that was removed
  EXPECT_EQ(open(), Encoded());
  fs::rename(t / "data/0.png", t / "data/9.png");
  fs::rename(t / "data/0.txt", t / "data/9.txt");
  EXPECT_EQ(open(), Encoded());
  fs::copy(t / "data", t / "copy");
  EXPECT_EQ(open({.resolution = 8}, "copy"), Encoded());
  write("8", 60, "new");  // equal to another one
  EXPECT_EQ(open(), Encoded());
  EXPECT_EQ(open({.resolution = 8, .random_flip = true}), (Encoded{7, 0}));
  EXPECT_EQ(open({.resolution = 8, .center_crop = true}), (Encoded{7, 0}));
  EXPECT_EQ(open(), Encoded());
}

TEST_F(ItemCache, ReadsFilesWhoseHashesAreDamaged) {
  write("0", 10, "a");
  write("1", 20, "bb");
  open();
  std::string hashes = read_file(t / "hashes.txt");
  hashes[hashes.find('\n') + 1] ^= 1;
  write_file_atomic(t / "hashes.txt", hashes);
  EXPECT_EQ(open(), Encoded());
  EXPECT_EQ(files_read, 2);
}

TEST_F(ItemCache, WhatNoRunUsesIsCountedAndRemoved) {
  for (int i = 0; i < 6; ++i) write(std::to_string(i), 10 * i, std::string(static_cast<size_t>(i) + 1, 'a'));
  const std::string mine = t / "runs/mine", other = t / "runs/other";
  make_folders(mine);
  make_folders(other);
  fs::copy(t / "data", t / "small");
  for (const int i : {2, 3, 4, 5})
    for (const char* ending : {".png", ".txt"}) fs::remove(t / fmt::format("small/{}{}", i, ending));
  const auto report = [&] {
    testing::internal::CaptureStderr();
    report_unused_items({t / "cache", mine});
    return testing::internal::GetCapturedStderr();
  };
  open({.resolution = 8}, "data", mine);
  open({.resolution = 8}, "small", other);
  for (const std::string& run : {mine, other}) forget_used_items({t / "cache", run});
  EXPECT_EQ(report(), "");
  fs::remove(t / "data/0.png");  // of another run, too
  fs::remove(t / "data/3.png");
  write_file_atomic(t / "data/4.txt", "bbbbbb");
  begin_used_items({t / "cache", mine});
  EXPECT_EQ(prune_cache(t / "cache").unused, 0);  // as long as the data is not open
  open({.resolution = 8}, "data", mine);
  EXPECT_EQ(report(), "");
  forget_used_items({t / "cache", mine});
  // Unused: the image 3, its caption, and the old one of 4.
  EXPECT_NE(report().find(": 3 of 13 cached items are not used by this dataset or another run ("), std::string::npos)
      << report();
  EXPECT_EQ(prune_cache(t / "cache").unused, 3);
  EXPECT_EQ(report(), "");
  EXPECT_EQ(open({.resolution = 8}, "data", mine), Encoded());
  EXPECT_EQ(open({.resolution = 8}, "small", other), Encoded());
  fs::remove_all(other);  // its two images are used no more than image 1 of the other, and its caption
  EXPECT_EQ(prune_cache(t / "cache").unused, 2);
  EXPECT_EQ(open({.resolution = 8}, "data", mine), Encoded());
  EXPECT_EQ(open({.resolution = 8}, "small", ""), (Encoded{1, 1}));
  EXPECT_THROW(prune_cache(t / "data"), Error);
  EXPECT_TRUE(exists(t / "data/1.png"));
}

// S4-58
TEST(CachedSamples, AreMirroredByTheirOwnBitsAndAnEpochHasEveryoneOnce) {
  const TemporaryFolder t;
  const ImageConfig config{.resolution = 8, .random_flip = true};
  const CachedImages all = cached(
      t / "cache", synthetic(40), 7, [](const auto& l) { return made(l); }, config);
  const auto samples = cached_examples(all.buckets[0], config);
  auto batches = example_batches(samples, 8, 3);
  EXPECT_EQ(batches->size(), 40);
  // The same images, mirrored or not, as when they are read while training.
  auto read = image_batches(synthetic(40), config, {.stream = {.seed = 3}, .batch = 8}, nullptr);
  std::vector<HostArray> seen;
  int64_t mirrored_ones = 0;
  for (int step = 0; step < 10; ++step) {  // two epochs
    const HostArray now = batches->next().at("moments"),
                    expected = made(with_pixels(read->next().at("pixels"))).at("moments");
    EXPECT_TRUE(same(now, expected)) << step;
    seen.push_back(now);
    for (int64_t row = 0; row < 8; ++row)
      for (int64_t i = 0; i < 40; ++i)
        mirrored_ones += same(row_of(now, row), all.buckets[0]->read(i).at("mirrored.moments"));
  }
  EXPECT_GT(mirrored_ones, 20);
  EXPECT_LT(mirrored_ones, 60);
  // Resumed in the middle, the same batches follow.
  auto again = example_batches(samples, 8, 3);
  again->seek({.epoch = 0, .index = 24});
  for (size_t step = 3; step < 10; ++step) EXPECT_TRUE(same(again->next().at("moments"), seen[step])) << step;
}

#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
int64_t data_bytes() {
  std::ifstream status("/proc/self/status");
  for (std::string word; status >> word;)
    if (word == "VmData:") {
      int64_t kib = 0;
      status >> kib;
      return kib << 10;
    }
  return 0;
}

// S0-93
TEST(CacheImages, ACacheLargerThanTheMemoryIsMadeAndTrainedFrom) {
  constexpr int64_t kSamples = 64, kFloats = 1 << 18;  // 2 MiB each, with the mirrored one: 128 MiB
  const TemporaryFolder t;
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    ::mallopt(M_MMAP_THRESHOLD, 1 << 16);  // freed memory is returned at once
    ::mallopt(M_ARENA_MAX, 1);
    // 32 MiB for parts of 8 MiB during encoding and for batches of 2, plus the threads' stacks.
    const int64_t stacks = 9 * (int64_t{sysconf(_SC_NPROCESSORS_ONLN)} + 2) << 20;
    const rlimit limit{static_cast<rlim_t>(data_bytes() + stacks + (32 << 20)), RLIM_INFINITY};
    ::setrlimit(RLIMIT_DATA, &limit);
    try {
      const CachedImages all =
          cached(t / "cache", synthetic(kSamples), 4, [](const LoadedImages& l) { return made(l, kFloats); });
      auto batches = example_batches(cached_examples(all.buckets[0], {}), 2, 1);
      std::set<std::vector<float>> different;
      for (int64_t i = 0; i < kSamples / 2; ++i) {
        const Batch b = batches->next();
        for (int64_t row = 0; row < 2; ++row) {
          const HostArray one = row_of(b.at("moments"), row);
          const auto v = one.view<float>().first(24);
          different.emplace(v.begin(), v.end());
        }
      }
      ::_exit(std::ssize(different) == kSamples ? 0 : 2);
    } catch (const std::bad_alloc&) {
      ::_exit(3);
    } catch (const std::exception& e) {
      std::fprintf(stderr, "%s\n", e.what());
      ::_exit(4);
    }
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFEXITED(status)) << status;
  EXPECT_EQ(WEXITSTATUS(status), 0) << "3: out of memory";
  int64_t bytes = 0;
  for (const auto& e : fs::recursive_directory_iterator(t / "cache"))
    if (e.is_regular_file()) bytes += static_cast<int64_t>(e.file_size());
  EXPECT_GT(bytes, int64_t{127} << 20);
}
#endif

}  // namespace
}  // namespace md
