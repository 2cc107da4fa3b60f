// How fast the data side is, apart from any device: pictures decoded and resized, captions tokenized, batches gathered.
//   build/release/data_bench            needs the emoji font (fonts-noto-color-emoji) and CLIP's vocabulary
#include <benchmark/benchmark.h>

#include <algorithm>

#include "maxdiffusion/base/files.h"
#include "maxdiffusion/base/log.h"
#include "maxdiffusion/base/picture.h"
#include "maxdiffusion/base/temporary_folder.h"
#include "maxdiffusion/data/dataset.h"
#include "maxdiffusion/data/emoji.h"
#include "maxdiffusion/data/image_folder.h"
#include "maxdiffusion/data/pictures.h"
#include "maxdiffusion/data/source.h"
#include "maxdiffusion/data/tfrecord_writer.h"
#include "maxdiffusion/data/tokenizer.h"

namespace md {
namespace {

const std::string kBpe = MD_DEPS_DIR "/open_clip/bpe_simple_vocab_16e6.txt.gz";

// The emoji as 128 pixel PNG files, made once.
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
  int64_t pictures = 0;
  for (auto _ : state) {
    const TemporaryFolder folder;
    pictures += prepare_emoji(folder.path(), {.resolution = 64});
  }
  state.SetItemsProcessed(pictures);
}
BENCHMARK(prepare_emoji_folder)->Unit(benchmark::kMillisecond)->UseRealTime();

// PNG 128 → resolution, one core.
void decode_and_resize(benchmark::State& state) {
  std::vector<std::string> files;
  for (const ImageItem& item : list_image_folder(emoji_folder(), {.max_train_samples = 256}))
    files.push_back(read_file(item.file));
  const PictureConfig config{.resolution = state.range(0)};
  for (auto _ : state) {
    for (const std::string& f : files)
      benchmark::DoNotOptimize(fit_image(decode_image_bytes(f.data(), f.size(), "emoji"), config));
  }
  state.SetItemsProcessed(state.iterations() * static_cast<int64_t>(files.size()));
}
BENCHMARK(decode_and_resize)->Arg(64)->Arg(256)->Unit(benchmark::kMillisecond);

void load_folder(benchmark::State& state) {
  int64_t pictures = 0;
  emoji_folder();
  for (auto _ : state)
    pictures += load_pictures(open_source({.train_data_dir = emoji_folder()}), {.resolution = 64}).pixels.dims()[0];
  state.SetItemsProcessed(pictures);
}
BENCHMARK(load_folder)->Unit(benchmark::kMillisecond)->UseRealTime();

// --- kinds of data: records read and parsed, without decoding, on one core; items are records
// --------------------------

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

// The emoji in a tar file, 64 latents with text embeddings of SDXL at 1024 pixels as TFRecords, and, where Python has
// their libraries, the emoji as Parquet, Arrow and ArrayRecord files: see bench/data_files.py.
const std::string& data_files() {
  static const TemporaryFolder folder;
  static const bool made = [] {
    make_folders(folder / "tar");
    FileWriter tar(folder / "tar/emoji.tar");
    for (const ImageItem& item : list_image_folder(emoji_folder(), {})) {
      const std::string stem = item.file.substr(item.file.rfind('/') + 1, 4);
      const std::string members =
          tar_member(stem + ".png", read_file(item.file)) + tar_member(stem + ".txt", item.caption);
      tar.write(members.data(), members.size());
    }
    const std::string end(1024, '\0');
    tar.write(end.data(), end.size());
    tar.close();
    TfrecordShards shards(folder / "cached", 16);
    HostArray latents(Shape{DType::f32, {128, 128, 4}}), text(Shape{DType::f32, {77, 2048}}),
        pooled(Shape{DType::f32, {1280}}), ids(Shape{DType::s32, {2, 77}});
    for (HostArray* a : {&latents, &text, &pooled, &ids}) std::fill_n(a->mutable_data(), a->bytes(), std::byte{1});
    for (int i = 0; i < 64; ++i)
      shards.add({{"pixel_values", latents}, {"prompt_embeds", text}, {"text_embeds", pooled}, {"input_ids", ids}});
    shards.close();
    const std::string make =
        "python3 " MD_SOURCE_DIR "/bench/data_files.py '" + emoji_folder() + "' '" + folder.path() + "'";
    if (std::system(make.c_str()) != 0) log_warning("no Parquet, Arrow and ArrayRecord files: {} failed", make);
    return true;
  }();
  (void)made;
  return folder.path();
}

void read_records(benchmark::State& state, DataSourceConfig config) {
  config.train_data_dir = config.train_data_dir.empty() ? emoji_folder() : data_files() + "/" + config.train_data_dir;
  if (!exists(config.train_data_dir)) return state.SkipWithError("not made");
  RecordStream stream(open_source(config), {.window = 256});
  int64_t bytes = 0;
  for (auto _ : state) {
    const Record r = stream.next().read();
    bytes += static_cast<int64_t>(r.picture.bytes.size() + r.pixels.bytes() + r.caption.size());
    for (const auto& [name, a] : r.arrays) bytes += static_cast<int64_t>(a.bytes());
  }
  state.SetItemsProcessed(state.iterations());
  state.SetBytesProcessed(bytes);
}
BENCHMARK_CAPTURE(read_records, image_folder, {.dataset_type = "image_folder"});
BENCHMARK_CAPTURE(read_records, parquet, {.dataset_type = "hf", .train_data_dir = "emoji.parquet"});
BENCHMARK_CAPTURE(read_records, arrow, {.dataset_type = "hf", .train_data_dir = "emoji.arrow"});
BENCHMARK_CAPTURE(read_records, tfrecord_cached,
                  {.dataset_type = "tfrecord", .train_data_dir = "cached", .array_columns = sdxl_cached_columns()});
BENCHMARK_CAPTURE(read_records, webdataset, {.dataset_type = "webdataset", .train_data_dir = "tar"});
BENCHMARK_CAPTURE(read_records, grain, {.dataset_type = "grain", .train_data_dir = "emoji.array_record"});
BENCHMARK_CAPTURE(read_records, synthetic, {.dataset_type = "synthetic", .resolution = 128});

// The same as batches of 16 pictures of 64 pixels, on all cores, two batches ahead; items are pictures.
void read_batches(benchmark::State& state, DataSourceConfig config) {
  config.train_data_dir = config.train_data_dir.empty() ? emoji_folder() : data_files() + "/" + config.train_data_dir;
  if (!exists(config.train_data_dir)) return state.SkipWithError("not made");
  auto data = prefetch(picture_batches(open_source(config), {.resolution = 64}, {.batch = 16}, nullptr), 2);
  for (auto _ : state) benchmark::DoNotOptimize(data->next());
  state.SetItemsProcessed(state.iterations() * 16);
  state.SetBytesProcessed(state.iterations() * 16 * 64 * 64 * 3);
}
BENCHMARK_CAPTURE(read_batches, image_folder, {.dataset_type = "image_folder"})->UseRealTime();
BENCHMARK_CAPTURE(read_batches, parquet, {.dataset_type = "hf", .train_data_dir = "emoji.parquet"})->UseRealTime();
BENCHMARK_CAPTURE(read_batches, webdataset, {.dataset_type = "webdataset", .train_data_dir = "tar"})->UseRealTime();

void open_vocabulary(benchmark::State& state) {
  for (auto _ : state) benchmark::DoNotOptimize(ClipTokenizer::from_bpe(kBpe));
}
BENCHMARK(open_vocabulary)->Unit(benchmark::kMillisecond);

// All emoji names with the cache of words warm; items are texts.
void tokenize_captions(benchmark::State& state) {
  const ClipTokenizer tokenizer = ClipTokenizer::from_bpe(kBpe);
  int64_t tokens = 0;
  for (auto _ : state) {
    for (const std::string& c : captions()) {
      const auto ids = tokenizer.encode(c);
      tokens += std::ranges::find(ids, tokenizer.end_id()) - ids.begin() - 1;
    }
  }
  state.SetItemsProcessed(state.iterations() * static_cast<int64_t>(captions().size()));
  state.counters["tokens"] = benchmark::Counter(static_cast<double>(tokens), benchmark::Counter::kIsRate);
}
BENCHMARK(tokenize_captions)->Unit(benchmark::kMillisecond);

// Batches of 16 latents [8, 8, 4] with text embeddings [77, 64]; the argument is the depth of prefetch, 0 for none.
void gather_batches(benchmark::State& state) {
  HostArray latents(Shape{DType::f32, {4096, 8, 8, 4}}), text(Shape{DType::f32, {4096, 77, 64}});
  std::ranges::fill(latents.mutable_view<float>(), 1.0f);
  std::ranges::fill(text.mutable_view<float>(), 1.0f);
  auto data = in_memory({{"latents", latents}, {"text", text}}, 16, 0);
  if (state.range(0)) data = prefetch(std::move(data), static_cast<int>(state.range(0)));
  for (auto _ : state) benchmark::DoNotOptimize(data->next());
  state.SetItemsProcessed(state.iterations());
  state.SetBytesProcessed(state.iterations() * 16 * static_cast<int64_t>((latents.bytes() + text.bytes()) / 4096));
}
BENCHMARK(gather_batches)->Arg(0)->Arg(2)->UseRealTime();

void grid_of_samples(benchmark::State& state) {
  const LoadedPictures folder =
      load_pictures(open_source({.train_data_dir = emoji_folder(), .max_train_samples = 32}), {.resolution = 64});
  std::vector<GridCell> cells;
  const size_t bytes = 64 * 64 * 3;
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
  benchmark::RunSpecifiedBenchmarks();
}
