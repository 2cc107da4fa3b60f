// The table of optimizer state in docs/train.md, measured from the optimizers' slots.

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <map>

#include "maxdiffusion/base/files.h"
#include "maxdiffusion/optim/optimizer.h"

namespace md {
namespace {

double bytes_per_weight(const std::vector<StateSlot>& slots, const Dims& dims) {
  int64_t bytes = 0;
  for (const StateSlot& slot : slots)
    if (const auto array = slot.array({dims, {}})) bytes += array->shape.bytes();
  return static_cast<double>(bytes) / static_cast<double>(Shape{DType::f32, dims}.elements());
}

const Dims kMatrix = {1024, 1024}, kConvolution = {320, 320, 3, 3}, kVector = {320};

TEST(OptimizerState, TakesTheBytesInTheManual) {
  std::string table =
      "| bytes of state per weight | matrix, 1024 × 1024 | convolution, 320 × 320 of 3 × 3 | vector of 320 | matrix, "
      "`moments_dtype=bfloat16` |\n| --- | --- | --- | --- | --- |\n";
  for (const std::string& name : optimizer_names()) {
    OptimConfig config;
    config.optimizer = name;
    const std::vector<StateSlot> slots = optimizer_slots(config);
    table += "| `" + name + "`";
    for (const Dims& dims : {kMatrix, kConvolution, kVector})
      table += fmt::format(" | {:.4g}", bytes_per_weight(slots, dims));
    config.moments_dtype = "bfloat16";
    table += fmt::format(" | {:.4g} |\n", bytes_per_weight(optimizer_slots(config), kMatrix));
  }
  const std::string path = MD_SOURCE_DIR "/docs/train.md", page = read_file(path),
                    head = "| bytes of state per weight |";
  const size_t from = page.find(head), end = page.find("\n\n", from) + 1;
  ASSERT_NE(from, page.npos);
  if (std::getenv("MD_UPDATE_DOCS")) write_file_atomic(path, page.substr(0, from) + table + page.substr(end));
  EXPECT_NE(read_file(path).find(table), page.npos) << "MD_UPDATE_DOCS=1 writes it:\n" << table;
}

// What the papers promise of a large matrix.
TEST(OptimizerState, IsAsSmallAsItsPaperSays) {
  const std::map<std::string, double> most = {
      {"adafactor", 0.01}, {"adamw", 8},    {"adamw8bit", 2.04},        {"came", 4.02}, {"lion", 4},
      {"muon", 4},         {"prodigy", 16}, {"schedule_free_adamw", 8}, {"sgd", 4}};
  for (const std::string& name : optimizer_names()) {
    OptimConfig config;
    config.optimizer = name;
    ASSERT_TRUE(most.contains(name)) << name;
    EXPECT_LE(bytes_per_weight(optimizer_slots(config), kMatrix), most.at(name)) << name;
  }
}

}  // namespace
}  // namespace md
