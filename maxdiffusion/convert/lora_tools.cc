#include "maxdiffusion/convert/lora_tools.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <mutex>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/files.h"
#include "maxdiffusion/base/float_dtype.h"
#include "maxdiffusion/base/log.h"
#include "maxdiffusion/base/mapped_memory.h"
#include "maxdiffusion/base/parallel.h"
#include "maxdiffusion/checkpoint/safetensors.h"
#include "maxdiffusion/lora/low_rank.h"
#include "maxdiffusion/run/lora_files.h"

namespace md {
namespace {

namespace fs = std::filesystem;

void check_new(const std::string& path) {
  check(!exists(path), Code::invalid_config, "'{}' exists; expected a new name", path);
  check(path.ends_with(".safetensors"), Code::invalid_config, "'{}' does not end in .safetensors", path);
}

// --- extract
// -----------------------------------------------------------------------------------------------------------

enum class Kind { linear, convolution, other };
/// Layers that LoRA files can change: linear layers and convolutions, not embeddings of tokens or positions.
Kind kind_of(const std::string& path, const Dims& dims) {
  if (!path.ends_with(".weight") || dims.size() < 2 || path.find("embeddings.") != std::string::npos)
    return Kind::other;
  const bool point = std::all_of(dims.begin() + 2, dims.end(), [](int64_t n) { return n == 1; });
  return point ? Kind::linear : Kind::convolution;
}

/// tuned − base in f32; empty if they are equal.
HostArray difference_of(const HostArray& base, const HostArray& tuned) {
  const HostArray a = cast_and_release(base, DType::f32), b = cast_and_release(tuned, DType::f32);
  HostArray d(a.shape());
  std::ranges::transform(b.view<float>(), a.view<float>(), d.mutable_view<float>().begin(), std::minus<>());
  return std::ranges::any_of(d.view<float>(), [](float v) { return v != 0; }) ? d : HostArray();
}

double squares(const HostArray& a) {
  double sum = 0;
  for (float v : a.view<float>()) sum += static_cast<double>(v) * v;
  return sum;
}

/// Result for one component.
struct Extracted {
  std::map<std::string, LoraPair> pairs;
  std::vector<std::string> left;  // changed weights of a kind that the file cannot hold
  double all = 0, explained = 0;  // sums of squares
};

Extracted extract(const ArraysToWrite& base, const ArraysToWrite& tuned, const ExtractKeys& k) {
  Extracted out;
  std::vector<std::string> names;
  for (const auto& [name, array] : base) names.push_back(name);
  std::mutex mutex;
  parallel_for(static_cast<int64_t>(names.size()), [&](int64_t i, int) {
    const std::string& name = names[static_cast<size_t>(i)];
    const HostArray d = difference_of(base.at(name).make(), tuned.at(name).make());
    if (!d) return;
    const Kind kind = kind_of(name, d.dims());
    const int64_t rank = kind == Kind::linear ? k.rank : kind == Kind::convolution ? k.conv_rank : 0;
    const double all = squares(d);
    if (rank <= 0) {
      const std::lock_guard lock(mutex);
      out.left.push_back(name), out.all += all;
      return;
    }
    const LowRankFactors t = truncated_svd(d, rank);
    const DType type = parse_float_dtype("dtype", k.dtype);
    const std::lock_guard lock(mutex);
    out.pairs[name] = {t.down.cast(type), t.up.cast(type), static_cast<double>(t.rank())};
    out.all += all, out.explained += all * t.explained_variance;
  });
  std::ranges::sort(out.left);
  return out;
}

// --- looking
// -----------------------------------------------------------------------------------------------------------

/// The model's prefix in a module's name, as files write it.
std::string part_of(const std::string& module) {
  for (const char* beginning : {"lora_unet_", "lora_te1_", "lora_te2_", "lora_te_"})
    if (module.starts_with(beginning)) return std::string(beginning, std::string(beginning).size() - 1);
  const size_t dot = module.find('.');
  return dot == std::string::npos ? "" : module.substr(0, dot);
}

/// The part after the last number that is followed by text: "attn1.to_out.0" of "….0.attn1.to_out.0".
std::string target_of(const std::string& module) {
  size_t begin = 0;
  for (size_t i = 0; i + 1 < module.size(); ++i) {
    const bool separator = module[i] == '.' || module[i] == '_';
    if (separator && i > 0 && std::isdigit(static_cast<unsigned char>(module[i - 1]))) begin = i + 1;
  }
  return module.substr(begin);
}

/// "16 (256), 8 (4)": each value and its count.
template <class T>
std::string counted(const std::map<T, int>& values) {
  std::vector<std::string> texts;
  for (const auto& [value, count] : values) texts.push_back(fmt::format("{} ({})", value, count));
  return fmt::format("{}", fmt::join(texts, ", "));
}

}  // namespace

void extract_lora(const std::string& base, const std::string& tuned, const std::string& to, const ExtractKeys& k) {
  check(k.rank > 0 && k.conv_rank >= 0, Code::invalid_config, "rank is {} and conv_rank {}; expected 1 and 0 at least",
        k.rank, k.conv_rank);
  parse_float_dtype("dtype", k.dtype);
  check_new(to);
  const ModelFolder a = open_folder(base, k.folder), b = open_folder(tuned, k.folder);
  check(a.pipeline() == b.pipeline(), Code::invalid_config,
        "'{}' is a {}, '{}' a {}; expected two model folders of one class", base, a.pipeline(), tuned, b.pipeline());
  const auto family = make_family(a);
  LoraFile lora{.name = to};
  for (const std::string& component : lora_components(*family)) {
    const ArraysToWrite before = stored_values(a, component), after = stored_values(b, component);
    for (const auto& [name, array] : before) {
      const auto found = after.find(name);
      check(found != after.end() && found->second.shape.dims == array.shape.dims, Code::io,
            "{} of '{}' and '{}': '{}' differs in shape; expected the same shapes", component, base, tuned, name);
    }
    Extracted e = extract(before, after, k);
    if (!e.pairs.empty() || !e.left.empty())
      log_info("{}: {} pairs of matrices keep {:.2f} % of the difference (sum of squares)", component, e.pairs.size(),
               e.all > 0 ? 100 * e.explained / e.all : 100.0);
    if (!e.left.empty())
      log_warning("{}: {} more tensors differ and are not in the file{}: {}{}", component, e.left.size(),
                  k.conv_rank == 0 ? " (conv_rank=N adds convolutions)" : "",
                  fmt::join(e.left.begin(), e.left.begin() + std::min<long>(std::ssize(e.left), 5), ", "),
                  e.left.size() > 5 ? ", …" : "");
    if (!e.pairs.empty()) lora.pairs[component] = std::move(e.pairs);
  }
  check(!lora.pairs.empty(), Code::invalid_config, "'{}' and '{}' do not differ in any layer that LoRA changes", base,
        tuned);
  write_lora_layout(to, lora, a, *family, k.layout,
                    {{"ss_sd_model_name", fs::path(base).filename().string()}, {"ss_training_comment", "extracted"}});
  log_info("{}: {}", to, summary(lora));
}

void resize_lora(const std::string& from, const std::string& to, const ResizeKeys& k) {
  check(k.explained_variance > 0 && k.explained_variance <= 1, Code::invalid_config,
        "explained_variance is {}; expected above 0 and at most 1", k.explained_variance);
  check(!k.rank || *k.rank > 0, Code::invalid_config, "rank is {}; expected 1 at least", k.rank.value_or(0));
  check(k.rank || k.explained_variance < 1, Code::invalid_config,
        "rank is null; expected rank=N, or explained_variance below 1");
  check_new(to);
  LoraContents file = read_lora_contents(lora_file(from));
  std::map<std::string, std::map<int64_t, int>> ranks;
  std::map<std::string, std::pair<double, double>> sums;  // of squares: kept, all
  std::mutex mutex;
  HostArrays out = file.others;
  int64_t largest = 0;
  parallel_for(std::ssize(file.pairs), [&](int64_t i, int) {
    const NamedPair& p = file.pairs[static_cast<size_t>(i)];
    const LowRankFactors t = resized(p.pair, k.rank.value_or(p.pair.rank()), k.explained_variance);
    // Keeps alpha / rank, so that the product has the same scale.
    const double alpha = p.pair.alpha / static_cast<double>(p.pair.rank()) * static_cast<double>(t.rank());
    const DType type = k.dtype.empty() ? p.pair.down.dtype() : parse_float_dtype("dtype", k.dtype);
    double all = 0;
    for (float v : t.up.view<float>()) all += static_cast<double>(v) * v;
    const std::lock_guard lock(mutex);
    put_pair(p, {t.down.cast(type), t.up.cast(type), alpha}, out);
    ++ranks[part_of(p.module)][t.rank()];
    auto& [explained, sum] = sums[part_of(p.module)];
    explained += t.explained_variance * all, sum += all;
    largest = std::max(largest, t.rank());
  });
  for (const char* rank : {"ss_network_dim", "ss_network_alpha"})
    if (file.metadata.contains(rank)) file.metadata[rank] = "Dynamic";
  std::erase_if(file.metadata, [](const auto& m) {  // their values are in the matrices
    const std::string name = m.first.substr(m.first.rfind('.') + 1);
    return name == "lora_adapter_metadata" || name == "lora_alpha" || name == "network_alpha" || name == "alpha";
  });
  write_safetensors(to, out, file.metadata);
  for (const auto& [part, values] : ranks)
    fmt::print("{}: rank {}; {:.2f} % of the sum of squares kept\n", part.empty() ? "all" : part, counted(values),
               100 * sums[part].first / std::max(sums[part].second, 1e-300));
}

void convert_lora(const std::string& model, const std::string& from, const std::string& to, const LoraLayoutKeys& k) {
  check_new(to);
  const ModelFolder folder = open_folder(model, k.folder);
  const auto family = make_family(folder);
  const LoraFile lora =
      read_lora(lora_file(from), lora_targets(folder, *family), "", missing_keys(k.lora_missing_keys));
  write_lora_layout(to, lora, folder, *family, k.layout,
                    {{"ss_sd_model_name", fs::path(model).filename().string()}, {"ss_training_comment", "converted"}});
  log_info("{}: {}", to, summary(lora));
}

void print_lora(const std::string& from) {
  const std::string path = lora_file(from);
  const LoraContents file = read_lora_contents(path, true);
  struct Part {
    int pairs = 0;
    std::map<int64_t, int> ranks;
    std::map<double, int> alphas;
    std::map<std::string, int> types, targets;
  };
  std::map<std::string, Part> parts;
  for (const NamedPair& p : file.pairs) {
    Part& part = parts[part_of(p.module)];
    ++part.pairs, ++part.ranks[p.pair.rank()], ++part.targets[target_of(p.module)];
    ++part.types[std::string(to_string(p.pair.down.dtype()))];
    if (p.pair.alpha_in_file) ++part.alphas[p.pair.alpha];
  }
  fmt::print("{}: {:.1f} MB\n", path, static_cast<double>(fs::file_size(path)) / 1e6);
  for (const auto& [name, p] : parts)
    fmt::print("{}: {} pairs\n  rank: {}\n  alpha: {}\n  type: {}\n  targets: {}\n", name.empty() ? "all" : name,
               p.pairs, counted(p.ranks), p.alphas.empty() ? "absent: the rank" : counted(p.alphas), counted(p.types),
               counted(p.targets));
  std::map<std::string, int> endings;
  for (const auto& [key, array] : file.others) ++endings[key.substr(key.rfind('.') + 1)];
  if (!endings.empty()) fmt::print("other tensors: {}\n", counted(endings));
  for (const auto& [key, value] : file.metadata) fmt::print("metadata {}: {}\n", key, value);
}

}  // namespace md
