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
  const ImageFolderConfig config{.resolution = state.range(0)};
  for (auto _ : state) {
    for (const std::string& f : files)
      benchmark::DoNotOptimize(fit_image(decode_image_bytes(f.data(), f.size(), "emoji"), config, false));
  }
  state.SetItemsProcessed(state.iterations() * static_cast<int64_t>(files.size()));
}
BENCHMARK(decode_and_resize)->Arg(64)->Arg(256)->Unit(benchmark::kMillisecond);

void load_folder(benchmark::State& state) {
  int64_t pictures = 0;
  emoji_folder();
  for (auto _ : state) pictures += load_image_folder(emoji_folder(), {.resolution = 64}).pixels.dims()[0];
  state.SetItemsProcessed(pictures);
}
BENCHMARK(load_folder)->Unit(benchmark::kMillisecond)->UseRealTime();

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
  const LoadedFolder folder = load_image_folder(emoji_folder(), {.resolution = 64, .max_train_samples = 32});
  std::vector<GridCell> cells;
  const size_t bytes = 64 * 64 * 3;
  for (size_t i = 0; i < folder.files.size(); ++i) {
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
