// Data sets of several folders, through caches and batches: their files, repeats, sizes, captions and weights.
#include "maxdiffusion/run/folder_samples.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <set>

#include "maxdiffusion/base/files.h"
#include "maxdiffusion/base/host_array_rows.h"
#include "maxdiffusion/base/temporary_folder.h"
#include "maxdiffusion/data/records/file_hashes.h"
#include "maxdiffusion/media/image.h"

namespace md {
namespace {

/// Three folders: "a" (2 images of 16×16, 3 repeats, mirrored, shuffled tags), "b" (3 of 16×32, caption dropout 1/2)
/// and "c" of their class (2 of 16×16, weight 1/4). Every image has grey level 10·number + 10 on the left half and 5
/// less on the right.
struct Folders {
  TemporaryFolder t;
  std::vector<DataFolder> list;
  ImageConfig images;

  explicit Folders(bool shuffled) {
    for (const auto& [name, n, width] : {std::tuple{"a", 2, 16}, {"b", 3, 32}, {"c", 2, 16}}) {
      make_folders(t / name);
      for (int i = 0; i < n; ++i) {
        HostArray rgb(Shape{DType::u8, {16, width, 3}});
        auto v = rgb.mutable_view<uint8_t>();
        for (size_t k = 0; k < v.size(); ++k)
          v[k] = static_cast<uint8_t>(10 * (1 + i + (name[0] - 'a') * 5) -
                                      (static_cast<int>(k) / 3 % width >= width / 2 ? 5 : 0));
        write_png(t / fmt::format("{}/{}.png", name, i), rgb);
        write_file_atomic(t / fmt::format("{}/{}.txt", name, i), fmt::format("{}{}, x, y, z", name, i));
      }
      list.push_back({.where = name, .folder = t / name});
    }
    list[0].repeats = 3;
    list[2].regularization = true;
    images = {.resolution = 16, .random_flip = true, .mask = MaskFrom::whole, .mask_downscale = 8};
    images.folders.assign(3, images);
    images.folders[0].buckets = images.folders[2].buckets = AspectBuckets::of({{16, 16}});
    images.folders[1].buckets = AspectBuckets::of({{8, 16}});
    images.folders[1].random_flip = images.folders[2].random_flip = false;
    images.folders[2].loss_weight = 0.25;
    if (shuffled) list[0].captions.shuffle = true, list[0].captions.keep_tokens = 1;
    list[1].captions.dropout = 0.5;
    for (size_t i = 0; i < 3; ++i) images.folders[i].captions = list[i].captions;
  }
  std::shared_ptr<const DataFolders> open() const { return std::make_shared<DataFolders>("it", list); }
  /// Samples per epoch: 2·3, 3·1, and as many of the class as both.
  static constexpr int64_t kEpoch = 18;
};

HostArray codes(const std::vector<std::string>& captions) {
  HostArray a(Shape{DType::u8, {std::ssize(captions), 16}});
  std::memset(a.mutable_data(), 0, a.bytes());
  for (size_t i = 0; i < captions.size(); ++i)
    std::memcpy(a.mutable_data() + 16 * i, captions[i].data(), std::min<size_t>(captions[i].size(), 16));
  return a;
}
std::string caption_in(const HostArray& row) {
  const std::string all(reinterpret_cast<const char*>(row.data()), 16);
  return all.substr(0, all.find('\0'));
}

/// Batches of cached samples, as in a run.
std::unique_ptr<Dataset> batches(const Folders& f, const std::string& cache, int64_t batch,
                                 const BatchShare& share = {}) {
  const auto source = f.open();
  const bool vary = source->captions_vary();
  const auto encode = [&](const LoadedImages& loaded, const Encoded&) {
    HostArrays out = {{"pixels", loaded.pixels}, {"mirrored.pixels", mirrored(loaded.pixels)}, {"mask", loaded.mask}};
    return out;
  };
  FileHashes hashes("");
  const CachedCaptions captions{.key = "key", .encode = [](const std::vector<std::string>& texts) {
                                  return HostArrays{{"text", codes(texts)}};
                                }};
  const CachedImages all = cache_images(sort_into_aspect_buckets(source, f.images, false, &hashes), f.images,
                                        {{cache, ""}, "key", "arrays", 2}, encode, vary ? nullptr : &captions);
  FolderText text{.fields = nullptr, .empty = {{"text", codes({""})}}};
  if (vary) text.fields = [](const std::string& caption) { return HostArrays{{"text", codes({caption})}}; };
  std::vector<std::shared_ptr<const Examples>> samples;
  for (const auto& bucket : all.buckets) samples.push_back(folder_samples(bucket, source, f.images, text));
  return examples_in_aspect_buckets(samples, batch, {.seed = 7, .share = share});
}

struct Sample {
  Dims dims;
  int level;
  bool flipped;
  float weight;
  std::string caption;
  auto operator<=>(const Sample&) const = default;
};
std::vector<Sample> samples_of(const Batch& b) {
  std::vector<Sample> out;
  for (int64_t i = 0; i < b.at("pixels").dims()[0]; ++i) {
    const HostArray pixels = row_of(b.at("pixels"), i);
    const auto v = pixels.view<uint8_t>();
    const int left = v[0], right = v[v.size() - 1];
    out.push_back({pixels.dims(), std::max(left, right), left < right, row_of(b.at("mask"), i).view<float>()[0],
                   caption_in(row_of(b.at("text"), i))});
  }
  return out;
}
std::vector<Sample> take(Dataset& data, int64_t batches) {
  std::vector<Sample> out;
  for (; batches > 0; --batches)
    for (Sample& s : samples_of(data.next())) out.push_back(std::move(s));
  return out;
}

TEST(FolderSamples, ComeAsOftenAsTheirFoldersSay) {
  for (bool shuffled : {false, true}) {
    const Folders f(shuffled);
    const auto data = batches(f, f.t / "cache", 1);
    EXPECT_EQ(data->size(), Folders::kEpoch);
    std::map<int, int64_t> times;
    std::map<std::string, int> of_a, of_b;
    int mirrored = 0;
    for (const Sample& s : take(*data, 40 * Folders::kEpoch)) {
      ++times[s.level];
      const int folder = s.level / 10 - 1;
      EXPECT_EQ(s.dims, folder >= 5 && folder < 10 ? (Dims{8, 16, 3}) : (Dims{16, 16, 3}));
      EXPECT_EQ(s.weight, folder < 10 ? 1.0f : 0.25f);
      EXPECT_FALSE(folder >= 5 && s.flipped);
      mirrored += s.flipped;
      if (s.level == 10) ++of_a[s.caption];
      if (s.level == 60) ++of_b[s.caption];
      if (folder >= 10) {
        EXPECT_EQ(s.caption, fmt::format("c{}, x, y, z", folder - 10));
      }
    }
    // 9 samples of the class: 5 of the first image, 4 of the second.
    EXPECT_EQ(times,
              (std::map<int, int64_t>{{10, 120}, {20, 120}, {60, 40}, {70, 40}, {80, 40}, {110, 200}, {120, 160}}));
    EXPECT_NEAR(mirrored, 120, 30);
    if (shuffled) {
      EXPECT_EQ(of_a.size(), 6u);
      for (const auto& [caption, n] : of_a) EXPECT_TRUE(caption.starts_with("a0, ")) << caption;
    } else {
      EXPECT_EQ(of_a, (std::map<std::string, int>{{"a0, x, y, z", 120}}));
    }
    ASSERT_EQ(of_b.size(), 2u);
    EXPECT_NEAR(of_b[""], 20, 12);
    EXPECT_EQ(of_b[""] + of_b["b0, x, y, z"], 40);
  }
}

TEST(FolderSamples, GoOnInTheMiddleOfAnEpochAndAreSharedByProcesses) {
  const Folders f(true);
  const auto whole = batches(f, f.t / "cache", 4);
  const auto first = batches(f, f.t / "cache", 4, {0, 2, {}}), second = batches(f, f.t / "cache", 4, {1, 2, {}});
  for (int i = 0; i < 25; ++i) {
    const Position before = whole->position();
    const std::vector<Sample> expected = samples_of(whole->next());
    std::vector<Sample> both = samples_of(first->next());
    for (Sample& s : samples_of(second->next())) both.push_back(std::move(s));
    ASSERT_EQ(both, expected) << i;
    const auto again = batches(f, f.t / "cache", 4);
    again->seek(before);
    ASSERT_EQ(samples_of(again->next()), expected) << i;
  }
}

TEST(FolderSamples, ReadInEachStepAreAsThoseOfACache) {
  const Folders f(true);
  const auto source = f.open();
  const auto read = [&](const BatchShare& share) {
    return image_batches(repeated(sort_into_aspect_buckets(source, f.images), *source), f.images,
                         {.stream = {.seed = 7, .share = share}, .batch = 4, .workers = 2},
                         [](const std::vector<std::string>& captions) {
                           return Batch{{"text", codes(captions)}};
                         });
  };
  const auto in_steps = read({}), second = read({1, 2, {}}), cached = batches(f, f.t / "cache", 4);
  EXPECT_EQ(in_steps->size(), Folders::kEpoch);
  for (int i = 0; i < 25; ++i) {
    const std::vector<Sample> samples = samples_of(in_steps->next());
    ASSERT_EQ(samples, samples_of(cached->next())) << i;
    ASSERT_EQ(samples_of(second->next()), (std::vector<Sample>{samples[2], samples[3]}));
  }
}

TEST(FolderSamples, OfSmallOrNarrowImagesAreLeftOut) {
  Folders f(false);
  f.images.folders[1].least_area = int64_t{16} * 32 + 1;
  f.images.folders[2].greatest_aspect = 1;
  f.images.folders[0].least_side = 16;
  EXPECT_EQ(sort_into_aspect_buckets(f.open(), f.images).skipped, 3);
  f.images.folders[1].least_area = int64_t{16} * 32;
  EXPECT_EQ(sort_into_aspect_buckets(f.open(), f.images).skipped, 0);
  f.images.folders[1].greatest_aspect = 1.9;
  f.images.folders[0].least_side = 17;
  EXPECT_EQ(sort_into_aspect_buckets(f.open(), f.images).skipped, 5);
}

}  // namespace
}  // namespace md
