#include "maxdiffusion/checkpoint/weights.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <mutex>
#include <numeric>
#include <optional>
#include <set>
#include <utility>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/host_array_rows.h"
#include "maxdiffusion/base/layer_path.h"
#include "maxdiffusion/base/mapped_memory.h"
#include "maxdiffusion/checkpoint/checksums.h"
#include "maxdiffusion/checkpoint/safetensors.h"
#include "maxdiffusion/checkpoint/weight_format.h"

namespace md {
namespace {

constexpr size_t kListed = 10;  // names listed for each kind of error
/// The tokenizer's file in ComfyUI's files of T5 and UMT5.
constexpr const char* kTokenizer = "spiece_model";

/// `name` with the alias applied; none if the alias does not match.
std::optional<std::string> respelled(const std::string& name, const NameAlias& alias) {
  const size_t at =
      alias.prefix ? (name.starts_with(alias.model_name) ? 0 : std::string::npos) : name.find(alias.model_name);
  if (at == std::string::npos) return std::nullopt;
  return name.substr(0, at) + alias.found + name.substr(at + alias.model_name.size());
}

size_t edit_distance(const std::string& a, const std::string& b) {
  std::vector<size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), size_t{0});
  for (size_t i = 1; i <= a.size(); ++i) {
    size_t diagonal = std::exchange(row[0], i);
    for (size_t j = 1; j <= b.size(); ++j) {
      const size_t above = row[j];
      row[j] = std::min({above + 1, row[j - 1] + 1, diagonal + (a[i - 1] != b[j - 1])});
      diagonal = above;
    }
  }
  return row[b.size()];
}

/// The closest of `names`, if it is close enough to be intended.
std::optional<std::string> nearest(const std::string& name, const std::set<std::string>& names) {
  std::optional<std::string> best;
  size_t least = name.size() / 3 + 1;
  for (const std::string& n : names)
    if (size_t d = edit_distance(name, n); d < least) least = d, best = n;
  return best;
}

Dims without_trailing_ones(Dims d) {
  while (!d.empty() && d.back() == 1) d.pop_back();
  return d;
}

std::string listed(const std::vector<std::string>& names) {
  const auto shown = std::min(names.size(), kListed);
  auto text = fmt::format("{}", fmt::join(names.begin(), names.begin() + static_cast<long>(shown), ", "));
  if (shown < names.size()) text += fmt::format(" and {} more", names.size() - shown);
  return text;
}

/// An array of a file, or the arrays from which it is computed when read.
struct Match {
  HostArray array;
  WeightAlias from = {};
  Dims dims = {};                          // of the dequantized array
  const WeightFormat* format = nullptr;    // null: a plain array
  std::vector<HostArray> companions = {};  // inputs of the format besides the array

  /// Type and sizes for the model.
  Shape result() const {
    if (!format) return array.shape();
    return {DType::f32, format->dims ? format->dims(array, companions, from.full_name()) : array.dims()};
  }
  HostArray read(DType type) const {
    const HostArray values = format ? format->dequantize(array, companions, from.full_name()) : array;
    const HostArray as_wanted = select_parts(values, from.part, from.parts).cast(type);
    HostArray out = from.transposed ? transposed(as_wanted) : as_wanted.reshaped(dims);
    if (out.owner() != array.owner()) release_pages(array.data(), array.bytes());
    return out;
  }
};

/// Matches names against one file and collects the errors.
class Matcher {
 public:
  Matcher(const SafetensorsReader& file, const LoadOptions& options) : file_(file), options_(options) {
    check_marks(file.tensors());
    for (const auto& [name, array] : file.tensors()) unused_.insert(name);
  }

  /// The file's array; if the file has none that matches, an empty array and a collected error.
  Match take(const std::string& name, const Shape& shape) {
    const std::optional<WeightAlias> found = find(name);
    if (!found) {
      if (options_.misfits) options_.misfits->push_back({name, shape.dims, std::nullopt});
      missing_.push_back(name);
      return {};
    }
    ++matched_;
    const std::string key = found->full_name();
    unused_.erase(key);
    if (options_.matched) options_.matched->insert(key);
    if (!found->prefix.empty()) prefixes_.insert(found->prefix);
    const HostArray& array = file_.tensors().at(key);
    const FoundFormat format = format_of(file_.tensors(), key);
    Match taken{array, *found, shape.dims, format.format};
    for (const std::string& other : format.companions) {
      taken.companions.push_back(file_.tensors().at(other));
      unused_.erase(other);
      if (options_.matched) options_.matched->insert(other);
    }
    const Shape stored = taken.result();
    Dims expected = without_trailing_ones(shape.dims);
    if (found->transposed && expected.size() == 2) std::swap(expected[0], expected[1]);
    if (found->parts > 1) expected[0] = expected[0] / std::ssize(found->part) * found->parts;
    if (without_trailing_ones(stored.dims) != expected ||
        (stored.dtype != shape.dtype && !(is_float(stored.dtype) && is_float(shape.dtype)))) {
      if (options_.misfits) options_.misfits->push_back({name, expected, without_trailing_ones(stored.dims)});
      other_shape_.push_back(
          fmt::format("'{}' is {} in '{}'; the model needs {}{}", key, to_string(stored), file_.file_of(key),
                      found->parts > 1 ? fmt::format("of {} equal parts ", found->parts) : "", to_string(shape)));
      return {};
    }
    return taken;
  }

  void finish(const std::string& path) {
    std::vector<std::string> unused;
    for (const std::string& n : unused_)
      if (!is_ignorable(n)) unused.push_back(n);
    const size_t counted_unused = options_.allow_unused ? 0 : unused.size();
    if (missing_.empty() && other_shape_.empty() && counted_unused == 0) return;
    Error e(Code::io, fmt::format("load weights from '{}': {} missing, {} unused, {} of another shape", path,
                                  missing_.size(), counted_unused, other_shape_.size()));
    if (!missing_.empty()) e.note("missing: " + listed(missing_));
    if (counted_unused > 0) e.note("unused: " + listed(unused));
    for (size_t i = 0; i < std::min(other_shape_.size(), kListed); ++i) e.note("shape: " + other_shape_[i]);
    if (other_shape_.size() > kListed) e.note(fmt::format("shape: and {} more", other_shape_.size() - kListed));
    for (size_t i = 0; i < std::min<size_t>(missing_.size(), 3); ++i)
      if (auto near = nearest(missing_[i], {unused.begin(), unused.end()}))
        e.note(fmt::format("nearest to '{}' in the file: '{}'", missing_[i], *near));
    if (matched_ == 0 && !missing_.empty())
      throw e.note(fmt::format("try: another file: '{}' has none of this component's weights", path));
    throw e.note("try: compare the config.json of the model with the file; they may describe different models");
  }

 private:
  bool is_ignorable(const std::string& n) const {
    const auto& beginnings = options_.weight_names.unneeded;
    return std::ranges::any_of(options_.ignorable, [&](auto& end) { return n.ends_with(end); }) || is_format_extra(n) ||
           n.ends_with(kTokenizer) ||
           std::ranges::any_of(beginnings, [&](auto& beginning) { return n.starts_with(beginning); }) ||
           (!prefixes_.empty() && std::ranges::none_of(prefixes_, [&](auto& p) { return n.starts_with(p); }));
  }

  std::optional<WeightAlias> find(const std::string& name) const {
    if (file_.tensors().contains(name)) return WeightAlias{.name = name};
    for (const NameAlias& alias : options_.aliases)
      if (auto other = respelled(name, alias); other && file_.tensors().contains(*other))
        return WeightAlias{.name = *other};
    if (options_.weight_names.aliases)
      for (const WeightAlias& other : options_.weight_names.aliases(name))
        if (file_.tensors().contains(other.full_name())) return other;
    return std::nullopt;
  }

  const SafetensorsReader& file_;
  const LoadOptions& options_;
  std::set<std::string> unused_, prefixes_;  // prefixes_: of WeightAlias
  std::vector<std::string> missing_, other_shape_;
  int64_t matched_ = 0;
};

/// The matches for one expected weight: one, or one for each layer of a stack.
struct Found {
  WantedWeight weight;
  std::vector<Match> parts;

  HostArray read(bool keep_type) const {
    Shape shape = weight.shape;
    if (keep_type && !parts.at(0).format) shape.dtype = parts[0].array.dtype();
    if (!is_stacked(weight.name)) return parts[0].read(shape.dtype);
    HostArray all(shape);
    std::byte* to = all.mutable_data();
    for (const Match& part : parts) {
      const HostArray layer = part.read(shape.dtype);
      std::memcpy(to, layer.data(), layer.bytes());
      release_pages(layer.data(), layer.bytes());
      to += layer.bytes();
    }
    return all;
  }
};

Found find(Matcher& matcher, const WantedWeight& w) {
  if (!is_stacked(w.name)) return {w, {matcher.take(w.name, w.shape)}};
  check(!w.shape.dims.empty(), Code::internal, "weight '{}': a stack of layers needs a leading size", w.name);
  Found found{w, {}};
  const Shape one{w.shape.dtype, {w.shape.dims.begin() + 1, w.shape.dims.end()}};
  for (int64_t i = 0; i < w.shape.dims[0]; ++i) found.parts.push_back(matcher.take(layer_path(w.name, i), one));
  return found;
}

/// A stack that is computed when its first layer is read, and released when all its layers have been read. Thread safe.
class MadeStack {
 public:
  explicit MadeStack(Shard shard) : shard_(std::move(shard)) {}
  HostArray row(int64_t i) {
    const std::lock_guard lock(mutex_);
    if (!values_) values_ = shard_.get(), left_ = shard_.slice.size[0];
    HostArray row = row_of(values_, i);
    if (--left_ == 0) values_ = {};
    return row;
  }

 private:
  Shard shard_;
  std::mutex mutex_;
  HostArray values_;
  int64_t left_ = 0;
};

}  // namespace

const std::vector<NameAlias>& published_aliases() {
  static const std::vector<NameAlias> table = {
      {.model_name = "text_model.", .found = "", .prefix = true},
      {.model_name = "", .found = "text_model.", .prefix = true},
      {.model_name = "vision_model.", .found = "", .prefix = true},
      {.model_name = "shared.", .found = "encoder.embed_tokens.", .prefix = true},
      {.model_name = ".to_q.", .found = ".query."},
      {.model_name = ".to_k.", .found = ".key."},
      {.model_name = ".to_v.", .found = ".value."},
      {.model_name = ".to_out.0.", .found = ".proj_attn."},
  };
  return table;
}

std::function<HostArrays()> open_weights(const std::string& path, const std::vector<WantedWeight>& weights,
                                         const LoadOptions& options) {
  return open_weights(SafetensorsReader::open(path), path, weights, options);
}

namespace {

std::vector<Found> match(const SafetensorsReader& file, const std::string& path,
                         const std::vector<WantedWeight>& weights, const LoadOptions& options) {
  Matcher matcher(file, options);
  std::vector<Found> found;
  for (const WantedWeight& w : weights) found.push_back(find(matcher, w));
  matcher.finish(path);
  return found;
}

}  // namespace

std::function<HostArrays()> open_weights(const SafetensorsReader& file, const std::string& path,
                                         const std::vector<WantedWeight>& weights, const LoadOptions& options) {
  return [found = match(file, path, weights, options), path, keep = options.keep_types] {
    verify_component(path);
    HostArrays out;
    for (const Found& f : found) out[f.weight.name] = f.read(keep);
    return out;
  };
}

ArraysToWrite open_each_weight(const SafetensorsReader& file, const std::string& path,
                               const std::vector<WantedWeight>& weights, const LoadOptions& options) {
  const std::vector<Found> found = match(file, path, weights, options);
  verify_component(path);
  ArraysToWrite out;
  for (const Found& f : found) {
    for (size_t i = 0; i < f.parts.size(); ++i) {
      const Match& part = f.parts[i];
      const Shape shape{options.keep_types && !part.format ? part.array.dtype() : f.weight.shape.dtype, part.dims};
      const std::string name =
          is_stacked(f.weight.name) ? layer_path(f.weight.name, static_cast<int64_t>(i)) : f.weight.name;
      out[name] = {shape, [part, type = shape.dtype] { return part.read(type); }};
    }
  }
  return out;
}

HostArrays load_weights(const std::string& path, const std::vector<WantedWeight>& weights, const LoadOptions& options) {
  return open_weights(path, weights, options)();
}

std::vector<std::string> weight_files(const SafetensorsReader& file, const std::string& path) {
  std::set<std::string> files;
  for (const auto& [name, array] : file.tensors()) files.insert(file.file_of(name));
  if (files.size() > 1)
    for (const auto& f : std::filesystem::directory_iterator(path))
      if (f.path().string().ends_with(".safetensors.index.json")) files.insert(f.path().string());
  return {files.begin(), files.end()};
}

NamedShards unstacked(const std::string& name, const ShardedArray& array) {
  if (!is_stacked(name)) return {{name, array}};
  check(!array.shape.dims.empty(), Code::internal, "weight '{}': a stack of layers needs a leading size", name);
  auto rest = [](const std::vector<int64_t>& v) { return std::vector<int64_t>(v.begin() + 1, v.end()); };
  const Shape one{array.shape.dtype, rest(array.shape.dims)};
  std::vector<ShardedArray> layers(static_cast<size_t>(array.shape.dims[0]), ShardedArray(one, {}));
  for (const Shard& p : array.shards) {
    const Slice slice{rest(p.slice.start), rest(p.slice.size)};
    const std::shared_ptr<MadeStack> stack = p.make ? std::make_shared<MadeStack>(p) : nullptr;
    for (int64_t i = 0; i < p.slice.size[0]; ++i)
      layers[static_cast<size_t>(p.slice.start[0] + i)].shards.push_back(
          stack ? Shard{slice, {}, [stack, i] { return stack->row(i); }} : Shard{slice, row_of(p.values, i)});
  }
  NamedShards out;
  for (size_t i = 0; i < layers.size(); ++i)
    out.emplace(layer_path(name, static_cast<int64_t>(i)), std::move(layers[i]));
  return out;
}

HostArrays unstacked(const std::string& name, const HostArray& array) {
  return as_arrays(unstacked(name, ShardedArray(array)));
}

}  // namespace md
