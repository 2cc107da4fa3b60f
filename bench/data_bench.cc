// Speed of the data pipeline without a device: decodes and resizes images, tokenizes captions, gathers batches.
//   build/release/data_bench            needs the emoji font (fonts-noto-color-emoji) and CLIP's vocabulary
#include <benchmark/benchmark.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>

#include <jpeglib.h>

#include "maxdiffusion/base/files.h"
#include "maxdiffusion/base/log.h"
#include "maxdiffusion/base/temporary_folder.h"
#include "maxdiffusion/data/batches/dataset.h"
#include "maxdiffusion/data/batches/image_batches.h"
#include "maxdiffusion/data/demo/emoji.h"
#include "maxdiffusion/data/images/load_images.h"
#include "maxdiffusion/data/images/prepare.h"
#include "maxdiffusion/data/records/image_folder.h"
#include "maxdiffusion/data/records/open_source.h"
#include "maxdiffusion/data/records/tfrecord_writer.h"
#include "maxdiffusion/media/image.h"
#include "maxdiffusion/tokenizers/clip_tokenizer.h"
#include "tests/bucket_server.h"

namespace md {
namespace {

// The columns of the reference's caches of latents and text embeddings.
const std::vector<std::string> kSdxlColumns = {"pixel_values", "input_ids", "prompt_embeds", "text_embeds"};

const std::string kBpe = MD_DEPS_DIR "/open_clip/bpe_simple_vocab_16e6.txt.gz";

// Folder of the emoji as 128-pixel PNG files, created on first use.
const std::string& emoji_folder() {
  static const TemporaryFolder folder;
  static const bool made = prepare_emoji(folder.path(), {.resolution = 128}) > 0;
  (void)made;
  return folder.path();
}
const std::vector<std::string>& captions() {
  static const std::vector<std::string> all = [] {
    std::vector<std::string> c;
    for (const ImageItem& item : list_image_folder(emoji_folder(), {})) c.push_back(item.caption);
    return c;
  }();
  return all;
}

void prepare_emoji_folder(benchmark::State& state) {
  int64_t images = 0;
  for (auto _ : state) {
    const TemporaryFolder folder;
    images += prepare_emoji(folder.path(), {.resolution = 64});
  }
  state.SetItemsProcessed(images);
}
BENCHMARK(prepare_emoji_folder)->Unit(benchmark::kMillisecond)->UseRealTime();

// Decodes a 128-pixel PNG and resizes it to the resolution, on one core.
void decode_and_resize(benchmark::State& state) {
  std::vector<std::string> files;
  for (const ImageItem& item : list_image_folder(emoji_folder(), {.max_train_samples = 256}))
    files.push_back(read_file(item.file));
  const ImageConfig config{.resolution = state.range(0)};
  for (auto _ : state) {
    for (const std::string& f : files)
      benchmark::DoNotOptimize(fit_image(decode_image_bytes(f.data(), f.size(), "emoji"), config));
  }
  state.SetItemsProcessed(state.iterations() * static_cast<int64_t>(files.size()));
}
BENCHMARK(decode_and_resize)->Arg(64)->Arg(256)->Unit(benchmark::kMillisecond);

void load_folder(benchmark::State& state) {
  int64_t images = 0;
  emoji_folder();
  for (auto _ : state)
    images += load_images(open_source({.train_data_dir = emoji_folder()}), {.resolution = 64}).pixels.dims()[0];
  state.SetItemsProcessed(images);
}
BENCHMARK(load_folder)->Unit(benchmark::kMillisecond)->UseRealTime();

// --- kinds of data ---

std::string tar_member(const std::string& name, const std::string& bytes) {
  std::string h(512, '\0');
  const auto put = [&](size_t at, const std::string& text) { h.replace(at, text.size(), text); };
  put(0, name), put(100, "0000644"), put(124, fmt::format("{:011o}", bytes.size())), put(136, "00000000000");
  put(148, "        "), put(156, "0"), put(257, std::string("ustar\000", 6) + "00");
  int64_t sum = 0;
  for (char c : h) sum += static_cast<uint8_t>(c);
  put(148, fmt::format("{:06o}", sum) + std::string("\0 ", 2));
  return h + bytes + std::string((512 - bytes.size() % 512) % 512, '\0');
}

/// Encodes `rgb` as JPEG of quality 90.
std::string encode_jpeg(const HostArray& rgb) {
  jpeg_compress_struct c{};
  jpeg_error_mgr errors{};
  c.err = jpeg_std_error(&errors);
  jpeg_create_compress(&c);
  unsigned char* bytes = nullptr;
  unsigned long size = 0;
  jpeg_mem_dest(&c, &bytes, &size);
  c.image_height = static_cast<JDIMENSION>(rgb.dims()[0]), c.image_width = static_cast<JDIMENSION>(rgb.dims()[1]);
  c.input_components = 3, c.in_color_space = JCS_RGB;
  jpeg_set_defaults(&c);
  jpeg_set_quality(&c, 90, TRUE);
  jpeg_start_compress(&c, TRUE);
  const auto pixels = rgb.view<uint8_t>();
  while (c.next_scanline < c.image_height) {
    auto* row = const_cast<uint8_t*>(pixels.data()) + size_t{c.next_scanline} * c.image_width * 3;
    jpeg_write_scanlines(&c, &row, 1);
  }
  jpeg_finish_compress(&c);
  std::string out(reinterpret_cast<char*>(bytes), size);
  jpeg_destroy_compress(&c);
  std::free(bytes);
  return out;
}

/// Stands in for remote storage, without its latency: it runs on this machine.
BucketServer& server() {
  static BucketServer s;
  return s;
}

// Folder of test data: the emoji as PNG in a tar and in TFRecord files, the emoji as JPEG at 128 pixels and 32 of them
// at 2048 pixels in folders, 64 latents with text embeddings of SDXL at 1024 pixels as TFRecords. If $PYTHON has the
// libraries, also the emoji as Parquet, Arrow and ArrayRecord files: see bench/data_files.py.
const std::string& data_files() {
  static const TemporaryFolder folder;
  static const bool made = [] {
    for (const char* name : {"tar", "jpeg", "big"}) make_folders(folder / name);
    FileWriter tar(folder / "tar/emoji.tar");
    TfrecordShards images(folder / "images", 1000);
    int64_t count = 0;
    for (const ImageItem& item : list_image_folder(emoji_folder(), {})) {
      const std::string stem = item.file.substr(item.file.rfind('/') + 1, 4), png = read_file(item.file);
      const std::string members = tar_member(stem + ".png", png) + tar_member(stem + ".txt", item.caption);
      tar.write(members.data(), members.size());
      images.add({{"image", png}, {"text", item.caption}});
      const HostArray rgb = decode_image(item.file);
      write_file_atomic(folder / ("jpeg/" + stem + ".jpg"), encode_jpeg(rgb));
      write_file_atomic(folder / ("jpeg/" + stem + ".txt"), item.caption);
      if (count++ % 128 == 0)
        write_file_atomic(folder / ("big/" + stem + ".jpg"), encode_jpeg(fit_image(rgb, {.resolution = 2048})));
    }
    images.close();
    const std::string end(1024, '\0');
    tar.write(end.data(), end.size());
    tar.close();
    TfrecordShards shards(folder / "cached", 16);
    HostArray latents(Shape{DType::f32, {4, 128, 128}}), text(Shape{DType::f32, {77, 2048}}),
        pooled(Shape{DType::f32, {1280}}), ids(Shape{DType::s32, {2, 77}});
    for (HostArray* a : {&latents, &text, &pooled, &ids}) std::fill_n(a->mutable_data(), a->bytes(), std::byte{1});
    for (int i = 0; i < 64; ++i)
      shards.add({{"pixel_values", latents}, {"prompt_embeds", text}, {"text_embeds", pooled}, {"input_ids", ids}});
    shards.close();
    server().put_files("bench", "tar", folder / "tar");
    server().put_files("bench", "jpeg", folder / "jpeg");
    for (const auto& [name, value] :
         std::vector<std::pair<const char*, std::string>>{{"AWS_ENDPOINT_URL", "http://" + server().address()},
                                                          {"AWS_ACCESS_KEY_ID", "reader"},
                                                          {"AWS_SECRET_ACCESS_KEY", "none"},
                                                          {"AWS_EC2_METADATA_DISABLED", "true"}})
      ::setenv(name, value.c_str(), 1);
    const char* python = std::getenv("PYTHON");
    const std::string make = std::string(python ? python : "python3") + " " MD_SOURCE_DIR "/bench/data_files.py '" +
                             emoji_folder() + "' '" + folder.path() + "'";
    if (std::system(make.c_str()) != 0) log_warning("no Parquet, Arrow and ArrayRecord files: {} failed", make);
    return true;
  }();
  (void)made;
  return folder.path();
}

struct KindOfData {
  const char* name;
  DataSourceConfig config;  // train_data_dir: relative to data_files(); "": the emoji
  int64_t resolution = 64;
};
const std::vector<KindOfData>& kinds() {
  static const std::vector<KindOfData> all = {
      {"folder_png", {.dataset_type = "image_folder"}},
      {"folder_jpeg", {.dataset_type = "image_folder", .train_data_dir = "jpeg"}},
      {"folder_jpeg_2048", {.dataset_type = "image_folder", .train_data_dir = "big"}, 512},
      {"parquet", {.dataset_type = "hf", .train_data_dir = "emoji.parquet"}},
      {"arrow", {.dataset_type = "hf", .train_data_dir = "emoji.arrow"}},
      {"tfrecord", {.dataset_type = "tfrecord", .train_data_dir = "images"}},
      {"tfrecord_cached", {.dataset_type = "tfrecord", .train_data_dir = "cached", .array_columns = kSdxlColumns}},
      {"webdataset", {.dataset_type = "webdataset", .train_data_dir = "tar"}},
      {"grain", {.dataset_type = "grain", .train_data_dir = "emoji.array_record"}},
      {"synthetic", {.dataset_type = "synthetic", .resolution = 128}},
      {"s3_folder_jpeg", {.dataset_type = "image_folder", .train_data_dir = "s3://bench/jpeg"}},
      {"s3_webdataset", {.dataset_type = "webdataset", .train_data_dir = "s3://bench/tar"}}};
  return all;
}
/// Opens the data set; null if its files could not be made.
std::shared_ptr<const RecordSource> opened(DataSourceConfig config) {
  std::string& where = config.train_data_dir;
  const std::string& files = data_files();
  if (where.empty()) {
    where = emoji_folder();
  } else if (!where.starts_with("s3://")) {
    where = files + "/" + where;
    if (!exists(where)) return nullptr;
  }
  return open_source(config);
}

// Reads and parses records on one core without decoding. Items are records, bytes the stored bytes.
void read_records(benchmark::State& state, const KindOfData& kind) {
  const auto source = opened(kind.config);
  if (!source) return state.SkipWithError("not made");
  RecordStream stream(source, {.window = 256});
  int64_t bytes = 0;
  for (auto _ : state) {
    const Record r = stream.next().read();
    bytes += static_cast<int64_t>(r.image.bytes.size() + r.pixels.bytes() + r.caption.size());
    for (const auto& [name, a] : r.arrays) bytes += static_cast<int64_t>(a.bytes());
  }
  state.SetItemsProcessed(state.iterations());
  state.SetBytesProcessed(bytes);
}

// Batches of 16 decoded images or arrays, on all cores, with two batches of prefetch. Bytes are those of the batches.
void read_batches(benchmark::State& state, const KindOfData& kind) {
  const auto source = opened(kind.config);
  if (!source) return state.SkipWithError("not made");
  auto data = prefetch(kind.config.array_columns.empty()
                           ? image_batches(source, {.resolution = kind.resolution}, {.batch = 16}, nullptr)
                           : array_batches(source, {.batch = 16}),
                       2);
  int64_t bytes = 0;
  for (auto _ : state) {
    for (const auto& [name, a] : data->next()) bytes += static_cast<int64_t>(a.bytes());
  }
  state.SetItemsProcessed(state.iterations() * 16);
  state.SetBytesProcessed(bytes);
}

const bool registered = [] {
  for (const KindOfData& k : kinds()) {
    benchmark::RegisterBenchmark(fmt::format("read_records/{}", k.name).c_str(), read_records, k)->UseRealTime();
    benchmark::RegisterBenchmark(fmt::format("read_batches/{}", k.name).c_str(), read_batches, k)->UseRealTime();
  }
  return true;
}();

// Decodes a JPEG of 2048 pixels for training at 512 on one core: at full size (0) or at the smallest sufficient DCT
// scale.
void decode_big_jpeg(benchmark::State& state) {
  const std::string folder = data_files() + "/big";
  const std::string jpeg = read_file(list_image_folder(folder, {})[0].file);
  for (auto _ : state) {
    const HostArray rgb = decode_image_bytes(jpeg.data(), jpeg.size(), "it", state.range(0));
    benchmark::DoNotOptimize(fit_image(rgb, {.resolution = 512}));
  }
  state.SetItemsProcessed(state.iterations());
  state.SetBytesProcessed(state.iterations() * static_cast<int64_t>(jpeg.size()));
}
BENCHMARK(decode_big_jpeg)->Arg(0)->Arg(512)->Unit(benchmark::kMillisecond);

void open_vocabulary(benchmark::State& state) {
  for (auto _ : state) benchmark::DoNotOptimize(ClipTokenizer::from_bpe(kBpe));
}
BENCHMARK(open_vocabulary)->Unit(benchmark::kMillisecond);

// Tokenizes all emoji names with a warm word cache; items are texts.
void tokenize_captions(benchmark::State& state) {
  const ClipTokenizer tokenizer = ClipTokenizer::from_bpe(kBpe);
  int64_t tokens = 0;
  for (auto _ : state) {
    for (const std::string& c : captions()) {
      const auto ids = tokenizer.encode(c, 77);
      tokens += std::ranges::find(ids, tokenizer.end_id()) - ids.begin() - 1;
    }
  }
  state.SetItemsProcessed(state.iterations() * static_cast<int64_t>(captions().size()));
  state.counters["tokens"] = benchmark::Counter(static_cast<double>(tokens), benchmark::Counter::kIsRate);
}
BENCHMARK(tokenize_captions)->Unit(benchmark::kMillisecond);

// Batches of 16 cached latents [8, 8, 4] with text embeddings [77, 64], in memory. The argument is the prefetch depth,
// 0 for none.
void gather_batches(benchmark::State& state) {
  HostArray latents(Shape{DType::f32, {4096, 8, 8, 4}}), text(Shape{DType::f32, {4096, 77, 64}});
  std::ranges::fill(latents.mutable_view<float>(), 1.0f);
  std::ranges::fill(text.mutable_view<float>(), 1.0f);
  auto data = in_memory({{"latents", latents}, {"text", text}}, 16, 0);
  if (state.range(0)) data = prefetch(std::move(data), static_cast<int>(state.range(0)));
  for (auto _ : state) benchmark::DoNotOptimize(data->next());
  state.SetItemsProcessed(state.iterations() * 16);
  state.SetBytesProcessed(state.iterations() * 16 * static_cast<int64_t>((latents.bytes() + text.bytes()) / 4096));
}
BENCHMARK(gather_batches)->Arg(0)->Arg(2)->UseRealTime();

void grid_of_samples(benchmark::State& state) {
  const LoadedImages folder =
      load_images(open_source({.train_data_dir = emoji_folder(), .max_train_samples = 32}), {.resolution = 64});
  std::vector<GridCell> cells;
  const size_t bytes = size_t{64} * 64 * 3;
  for (size_t i = 0; i < folder.names.size(); ++i) {
    cells.push_back({HostArray(Shape{DType::u8, {64, 64, 3}}, folder.pixels.owner(), folder.pixels.data() + i * bytes),
                     folder.captions[i]});
  }
  for (auto _ : state) benchmark::DoNotOptimize(encode_png(make_grid(cells, 8, 2)));
}
BENCHMARK(grid_of_samples)->Unit(benchmark::kMillisecond);

}  // namespace
}  // namespace md

int main(int argc, char** argv) {
  md::set_log_level(md::LogLevel::warning);
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 2;
  const md::RemoteScope remote;
  benchmark::RunSpecifiedBenchmarks();
}
