// Writes random weights of any size for a bench: random_weights FOLDER [dtype (bfloat16)]
// FOLDER is a model folder with configs and without weights. Each model gets its initial values (nn/param.h), which
// depend only on its sizes, in files named as in diffusers; each tokenizer gets its files. A tensor is generated while
// it is written, some rows at a time, so models may be larger than the memory.
#include <algorithm>
#include <cstdio>
#include <filesystem>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/files.h"
#include "maxdiffusion/checkpoint/checkpoint.h"
#include "maxdiffusion/checkpoint/safetensors.h"
#include "maxdiffusion/model_folder/model_folder.h"

namespace md {
namespace {

constexpr int64_t kElements = int64_t{1} << 24;  // generated at a time

/// The initial value of `p`, which must not be stacked.
HostArray value_of(const Param& p) {
  if (p.shape.dims.empty()) return initial_value(p, 0);
  HostArray all(p.shape);
  std::byte* to = all.mutable_data();
  const int64_t rows = p.shape.dims[0], step = std::max<int64_t>(kElements * rows / p.shape.elements(), 1);
  for (int64_t row = 0; row < rows; row += step) {
    Slice part = Slice::all(p.shape.dims);
    part.start[0] = row, part.size[0] = std::min(step, rows - row);
    const HostArray values = initial_value(p, 0, part);
    to = std::copy_n(values.data(), values.bytes(), to);
  }
  return all;
}

void write(const std::string& path, DType type) {
  const ModelFolder folder = ModelFolder::open(path);
  for (const auto& [name, component] : folder.components()) {
    const ParamTable table = folder.params(name, {.weights = type});
    ArraysToWrite arrays;
    for (const Param& p : table.params()) arrays[p.path] = {p.shape, [&p] { return value_of(p); }};
    write_sharded_safetensors(path + "/" + name, weights_stem(name), arrays);
    std::printf("%s: %.2f billion parameters\n", name.c_str(), static_cast<double>(table.count()) / 1e9);
  }
  for (const auto& [name, text] : folder.tokenizer_files()) {
    make_folders(std::filesystem::path(path + "/" + name).parent_path().string());
    write_file_atomic(path + "/" + name, text);
  }
}

}  // namespace
}  // namespace md

int main(int argc, char** argv) {
  try {
    md::check(argc == 2 || argc == 3, md::Code::invalid_config, "usage: random_weights FOLDER [dtype]");
    md::write(argv[1], md::parse_dtype(argc > 2 ? argv[2] : "bfloat16"));
  } catch (const md::Error& e) {
    std::fprintf(stderr, "error: %s\n", e.what());
    return 1;
  }
}
