#include "maxdiffusion/data/images/prepare.h"

#include <gtest/gtest.h>

#include <cstring>

#include <algorithm>
#include <functional>
#include <nlohmann/json.hpp>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/files.h"
#include "maxdiffusion/base/parse_json.h"
#include "maxdiffusion/base/temporary_folder.h"
#include "maxdiffusion/data/images/image_rows.h"
#include "maxdiffusion/data/images/test_images.h"
#include "maxdiffusion/data/records/open_source.h"
#include "maxdiffusion/media/image.h"
#include "maxdiffusion/media/resize.h"

namespace md {
namespace {

using nlohmann::json;

std::string file_text(const HostArray& rgb) {
  static const TemporaryFolder folder;
  write_png(folder / "it.png", rgb);
  return read_file(folder / "it.png");
}
Record record(const HostArray& rgb) { return {.name = "it", .image = Blob::of(file_text(rgb))}; }
std::vector<float> floats(const HostArray& a) { return {a.view<float>().begin(), a.view<float>().end()}; }
std::string error_of(const std::function<void()>& f, Code code) {
  try {
    f();
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), code) << e.what();
    return e.message();
  }
  return "no error";
}

/// The expected mask if the mask equals the image: the mean red value of each cell.
std::vector<float> cells_of(const HostArray& pixels, int64_t cell) {
  std::vector<float> out;
  const auto v = pixels.view<uint8_t>();
  for (int64_t y = 0; y < pixels.dims()[0]; y += cell)
    for (int64_t x = 0; x < pixels.dims()[1]; x += cell) {
      double sum = 0;
      for (int64_t i = 0; i < cell * cell; ++i)
        sum += v[static_cast<size_t>(((y + i / cell) * pixels.dims()[1] + x + i % cell) * 3)];
      out.push_back(static_cast<float>(sum / (255.0 * static_cast<double>(cell * cell))));
    }
  return out;
}

TEST(Mask, IsResizedByArea) {
  // See tools/golden/buckets.py: torch's interpolation. The image already has the target size, so cells are only
  // averaged.
  const json golden = parse_json(read_file(MD_SOURCE_DIR "/tests/golden/data/buckets.json"));
  for (const json& row : golden["masks"]) {
    const int64_t h = row["height"], w = row["width"];
    HostArray mask(Shape{DType::u8, {h, w, 3}});
    for (size_t i = 0; i < row["red"].size(); ++i)
      for (size_t c = 0; c < 3; ++c)
        mask.mutable_view<uint8_t>()[3 * i + c] = c == 0 ? row["red"][i].get<uint8_t>() : 7;
    Record r = record(smooth(h, w));
    r.mask = Blob::of(file_text(mask));
    const int64_t cell = row["cell"];
    const ImageConfig config{
        .resolution = std::max(h, w),
        .buckets = AspectBuckets({.resolution = std::max(h, w), .bucket_reso_steps = 1, .bucket_no_upscale = true}),
        .mask = MaskFrom::record,
        .mask_downscale = cell};
    const HostArray found = prepare_image(r, config, {}).arrays.at("mask");
    EXPECT_EQ(found.dims(), (Dims{h / cell, w / cell, 1}));
    for (size_t i = 0; i < row["weights"].size(); ++i)
      EXPECT_NEAR(found.view<float>()[i], row["weights"][i].get<double>(), 1e-7);
  }
}

TEST(Mask, FollowsTheImage) {
  const HostArray rgb = smooth(23, 41);
  Record r = record(rgb);
  r.mask = r.image;
  std::set<std::vector<float>> different;
  for (const ImageConfig& how : {ImageConfig{.resolution = 16}, ImageConfig{.resolution = 16, .center_crop = true},
                                 ImageConfig{.resolution = 16, .random_crop = true}, in_small_buckets()}) {
    ImageConfig config = how;
    config.mask = MaskFrom::record;
    config.mask_downscale = 2;
    for (const Placement& p : {Placement{}, Placement{.flip = true}, Placement{.flip = true, .y = 0.1, .x = 0.9}}) {
      const PreparedImage ready = prepare_image(r, config, p);
      EXPECT_EQ(floats(ready.arrays.at("mask")), cells_of(ready.arrays.at("pixels"), 2));
      different.insert(floats(ready.arrays.at("mask")));
    }
  }
  // Squeezed: mirrored or not. Cropped at the centre or at random: also at different positions. The same in a bucket.
  EXPECT_EQ(different.size(), 2 + 3 + 3u);
}

TEST(Mask, ComesFromAlphaOrIsOneEverywhere) {
  // 4 × 4 RGBA: the left half is transparent but has colours.
  const TemporaryFolder folder;
  std::string png;
  {
    const json golden = parse_json(read_file(MD_SOURCE_DIR "/tests/golden/data/buckets.json"));
    const std::string hex = golden["alpha_png"];
    for (size_t i = 0; i < hex.size(); i += 2) png += static_cast<char>(std::stoi(hex.substr(i, 2), nullptr, 16));
  }
  const ImageConfig config{.resolution = 4, .mask = MaskFrom::alpha, .mask_downscale = 2};
  const PreparedImage ready = prepare_image({.name = "it", .image = Blob::of(png)}, config, {});
  EXPECT_EQ(floats(ready.arrays.at("mask")), (std::vector<float>{0, 1, 0, 1}));
  for (uint8_t v : ready.arrays.at("pixels").view<uint8_t>()) EXPECT_EQ(v, 100);
  // Without a mask the same image is blended over white.
  const HostArray over =
      prepare_image({.name = "it", .image = Blob::of(png)}, {.resolution = 4}, {}).arrays.at("pixels");
  EXPECT_EQ(over.view<uint8_t>()[0], 255);
  EXPECT_EQ(over.view<uint8_t>()[9], 100);
  const PreparedImage opaque = prepare_image(record(smooth(4, 4)), config, {});
  EXPECT_EQ(floats(opaque.arrays.at("mask")), (std::vector<float>{1, 1, 1, 1}));
}

TEST(Mask, WeighsNoLessThanTheLeastWeightAndAllByTheFolders) {
  HostArray mask(Shape{DType::u8, {4, 4, 3}});
  for (size_t i = 0; i < 48; ++i) mask.mutable_view<uint8_t>()[i] = i % 12 < 6 ? 0 : 255;  // left half dark
  Record r = record(smooth(4, 4));
  r.mask = Blob::of(file_text(mask));
  ImageConfig config{.resolution = 4, .mask = MaskFrom::record, .mask_downscale = 2, .unmasked_weight = 0.25};
  EXPECT_EQ(floats(prepare_image(r, config, {}).arrays.at("mask")), (std::vector<float>{0.25, 1, 0.25, 1}));
  config.loss_weight = 0.5;
  EXPECT_EQ(floats(prepare_image(r, config, {}).arrays.at("mask")), (std::vector<float>{0.125, 0.5, 0.125, 0.5}));
  config.mask = MaskFrom::whole;
  EXPECT_EQ(floats(prepare_image(r, config, {}).arrays.at("mask")), (std::vector<float>{0.5, 0.5, 0.5, 0.5}));
}

TEST(CropBox, IsAllOfTheImageThatIsTrained) {
  const HostArray rgb = smooth(20, 30);
  Record whole = record(rgb), part = record(crop_rgb8(rgb, 3, 7, 8, 16));
  whole.mask = whole.image, part.mask = part.image;
  whole.box = {.left = 7, .top = 3, .width = 16, .height = 8};
  ImageConfig config = in_small_buckets();
  config.mask = MaskFrom::record;
  const PreparedImage a = prepare_image(whole, config, {}), b = prepare_image(part, config, {});
  EXPECT_EQ(a.fit.size, b.fit.size);
  for (const char* name : {"pixels", "mask"}) {
    ASSERT_EQ(a.arrays.at(name).shape(), b.arrays.at(name).shape());
    EXPECT_EQ(0, std::memcmp(a.arrays.at(name).data(), b.arrays.at(name).data(), a.arrays.at(name).bytes())) << name;
  }
  whole.box->width = 24;
  EXPECT_EQ(error_of([&] { prepare_image(whole, config, {}); }, Code::invalid_config),
            "it: crop_box [7, 3, 24, 8] is not inside of its 30x20 pixels");
}

TEST(CropBox, IsAllOfTheFramesThatAreTrained) {
  Record whole = record(smooth(20, 30)), part = record(smooth(8, 16));
  whole.image = part.image = {};
  for (const bool flip : {false, true}) {
    const HostArray rgb = flip ? flip_rgb8(smooth(20, 30)) : smooth(20, 30);
    whole.frames.push_back(Blob::of(file_text(rgb)));
    part.frames.push_back(Blob::of(file_text(crop_rgb8(rgb, 3, 7, 8, 16))));
  }
  whole.box = {.left = 7, .top = 3, .width = 16, .height = 8};
  ImageConfig config{.resolution = 8};
  config.clip = ClipConfig{.frames = 2};
  EXPECT_EQ(decode_record(whole, config, true).size, (ImageSize{8, 16, 2}));
  const PreparedImage a = prepare_image(whole, config, {}), b = prepare_image(part, config, {});
  EXPECT_EQ(a.fit.size, b.fit.size);
  const HostArray &x = a.arrays.at("pixels"), &y = b.arrays.at("pixels");
  ASSERT_EQ(x.shape(), y.shape());
  EXPECT_EQ(0, std::memcmp(x.data(), y.data(), x.bytes()));
  whole.box->top = 13;
  EXPECT_EQ(error_of([&] { prepare_image(whole, config, {}); }, Code::invalid_config),
            "it: crop_box [7, 13, 16, 8] is not inside of its 30x20 pixels");
}

TEST(Mask, MissingOrOfAnotherSizeIsRefusedByName) {
  const ImageConfig config{.resolution = 8, .mask = MaskFrom::record, .mask_downscale = 2};
  Record r = record(smooth(8, 8));
  EXPECT_EQ(error_of([&] { prepare_image(r, config, {}); }, Code::invalid_config), "it: no mask");
  r.mask = Blob::of(file_text(smooth(8, 9)));
  EXPECT_EQ(error_of([&] { prepare_image(r, config, {}); }, Code::invalid_config),
            "mask of it: it has 9x8 pixels; expected 8x8, the image's size");

  const TemporaryFolder folder;
  for (const char* part : {"/pictures", "/pictures/sub", "/masks", "/masks/sub"}) make_folders(folder.path() + part);
  for (const char* name : {"pictures/a.png", "pictures/sub/b.png", "masks/a.png"})
    write_png(folder / name, smooth(8, 8));
  const DataSourceConfig where{.train_data_dir = folder / "pictures", .conditioning_data_dir = folder / "masks"};
  const std::string refusal = error_of([&] { open_source(where); }, Code::io);
  EXPECT_NE(refusal.find("1 of 2 images have no mask there, the first is " + (folder / "pictures/sub/b.png")),
            std::string::npos)
      << refusal;
  write_png(folder / "masks/sub/b.png", smooth(8, 8, 1));
  const auto source = open_source(where);
  EXPECT_EQ(std::string(source->read(1).mask.bytes), read_file(folder / "masks/sub/b.png"));
  error_of([&] { open_source({.dataset_type = "synthetic", .conditioning_data_dir = folder / "masks"}); },
           Code::invalid_config);
}

// S4-57
TEST(Sizes, AreThoseOfTheImageAndItsCut) {
  // 20 high, 40 wide; the short side becomes 16, so the long side 32.
  const Record r = record(smooth(20, 40));
  const auto ids = [&](ImageConfig c, Placement p = {}) {
    c.sizes = true;
    return floats(prepare_image(r, c, p).arrays.at("time_ids"));
  };
  EXPECT_EQ(ids({.resolution = 16}), (std::vector<float>{20, 40, 0, 0, 16, 16}));
  EXPECT_EQ(ids({.resolution = 16, .center_crop = true}), (std::vector<float>{20, 40, 0, 8, 16, 16}));
  // Half a pixel goes to the even side, as torchvision's centre does: 0.5 to 0, 1.5 to 2.
  for (const auto& [width, left] : {std::pair{9, 0}, {10, 1}, {11, 2}, {13, 2}, {15, 4}})
    EXPECT_EQ(resize_and_crop({8, width}, {.resolution = 8, .center_crop = true}, {}).left, left) << width;
  const ImageConfig anywhere{.resolution = 16, .random_crop = true};
  EXPECT_EQ(ids(anywhere, {.x = 0}), (std::vector<float>{20, 40, 0, 0, 16, 16}));
  EXPECT_EQ(ids(anywhere, {.x = 0.3}), (std::vector<float>{20, 40, 0, 5, 16, 16}));
  // Mirrored, the crop has the same distance from the other side: 32 − 16 − 5.
  EXPECT_EQ(ids(anywhere, {.flip = true, .x = 0.3}), (std::vector<float>{20, 40, 0, 11, 16, 16}));
  // Its bucket is 20 wide and 12 high (5:3) or 24 × 8 (3:1): 2:1 is nearer to 5:3. It is resized to 24 × 12 and loses 2
  // columns on each side.
  EXPECT_EQ(ids(in_small_buckets()), (std::vector<float>{20, 40, 0, 2, 12, 20}));
}

TEST(Sizes, AreTheFilesWhenAJpegComesSmaller) {
  // 12 × 9, decoded at half the size for side 2; see open_source_test.cc.
  const json golden = parse_json(read_file(MD_SOURCE_DIR "/tests/golden/data/pictures.json"));
  for (const json& row : golden["files"]) {
    if (row["name"] != "rgb.jpg") continue;
    const std::string hex = row["file"];
    std::string bytes;
    for (size_t i = 0; i < hex.size(); i += 2) bytes += static_cast<char>(std::stoi(hex.substr(i, 2), nullptr, 16));
    const ImageSize stored{row["height"], row["width"]};
    EXPECT_EQ(decode_stored_image(bytes.data(), bytes.size(), "it", {.only_size = true}).size, stored);
    const DecodedImage small = decode_stored_image(bytes.data(), bytes.size(), "it", {.side = 2});
    EXPECT_EQ(small.size, stored);
    EXPECT_LT(small.rgb.dims()[0], stored.height);
    return;
  }
  FAIL() << "no rgb.jpg";
}

}  // namespace
}  // namespace md
