#include "maxdiffusion/model_folder/match_weights.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/parse_json.h"
#include "maxdiffusion/models/config_reader.h"

namespace md {
namespace {

using nlohmann::json;

/// Other programs' files join up to three parameters in one tensor.
constexpr size_t kParamsOfTensor = 3;
constexpr size_t kNamed = 4;  // members of a config in one message

/// Thrown to end the trace of a model with too many parameters.
struct Enough {};

/// The parameters of a model's trace, which stops if they are more than `tensors` tensors can hold. `whole`: the trace
/// was completed.
ParamTable expected_params(const std::string& name, const Component& c, size_t tensors, bool& whole) {
  Graph g;
  ParamTable table;
  const size_t most = kParamsOfTensor * tensors + 1;
  const Scope scope = Scope(g, table, name).with_source([&table, most](const Scope& below, Param p) {
    if (table.params().size() >= most) throw Enough();
    return below.resolve(std::move(p));
  });
  try {
    find_model_class(c.class_name)->trace(scope, c.config);
    whole = true;
  } catch (const Enough&) {
    whole = false;
  }
  return table;
}

/// Members of a config that `accepts` accepts, including those of lists, as "key is value".
class Members {
 public:
  Members(const json& config, std::function<bool(const std::string& key, int64_t value)> accepts)
      : accepts_(std::move(accepts)) {
    for (const auto& [key, value] : config.items()) look(key, key, value);
  }
  std::vector<std::string> sizes;

 private:
  void look(const std::string& key, const std::string& place, const json& value) {
    if (value.is_number_integer() && accepts_(key, value.get<int64_t>()))
      sizes.push_back(fmt::format("{} is {}", place, value.get<int64_t>()));
    for (size_t i = 0; value.is_array() && i < value.size(); ++i) look(key, fmt::format("{}[{}]", place, i), value[i]);
  }
  std::function<bool(const std::string&, int64_t)> accepts_;
};

/// For paths "before.N.behind": "before." → the largest N plus one.
using Repeats = std::map<std::string, int64_t>;
void count_repeats(const std::string& path, Repeats& repeats) {
  for (size_t from = 0, to; from < path.size(); from = to + 1) {
    to = std::min(path.find('.', from), path.size());
    const std::string part = path.substr(from, to - from);
    if (part.empty() || part.size() > 9 || !std::ranges::all_of(part, [](char c) { return c >= '0' && c <= '9'; }))
      continue;
    int64_t& n = repeats[path.substr(0, from)];
    n = std::max<int64_t>(n, std::stoll(part) + 1);
  }
}

/// Explains a missing parameter: the config repeats a part more often than the weights do. Empty if that is not the
/// cause.
std::string about_repeats(const ParamTable& expected, bool whole, const std::vector<Misfit>& misfits,
                          const json& config) {
  const auto missing = std::ranges::find_if(misfits, [](const Misfit& m) { return !m.found; });
  if (missing == misfits.end()) return "";
  std::set<std::string> all_missing;
  for (const Misfit& m : misfits)
    if (!m.found) all_missing.insert(m.name);
  Repeats expected_repeats, present_repeats, of_missing;
  for (const Param& p : expected.params()) {
    count_repeats(p.path, expected_repeats);
    if (!all_missing.contains(p.path)) count_repeats(p.path, present_repeats);
  }
  count_repeats(missing->name, of_missing);
  for (const auto& [before, n] : of_missing) {
    const int64_t want = expected_repeats.at(before),
                  have = present_repeats.contains(before) ? present_repeats.at(before) : 0;
    if (want == have) continue;
    const Members members(
        config, [&](const std::string& key, int64_t v) { return is_count(key) && (whole ? v == want : v >= want); });
    return fmt::format("it needs {}{} of {}N, the weights have {}{}", want, whole ? "" : " or more", before, have,
                       members.sizes.empty() ? "" : fmt::format("; {}", fmt::join(members.sizes, ", ")));
  }
  return "";
}

/// Explains a shape mismatch: a member of the config has a size that the tensor does not have. Empty if there is none.
std::string about_sizes(const std::vector<Misfit>& misfits, const json& config) {
  for (const Misfit& m : misfits)
    for (size_t i = 0; m.found && i < m.expected.size(); ++i) {
      const int64_t size = m.expected[i];
      if (i < m.found->size() && (*m.found)[i] == size) continue;
      const Members members(config, [&](const std::string&, int64_t v) { return v == size; });
      if (!members.sizes.empty() && members.sizes.size() <= kNamed)
        return fmt::format("{} would be {}, the weights have {}: {}", m.name, to_string(m.expected),
                           to_string(*m.found), fmt::join(members.sizes, ", "));
    }
  return "";
}

}  // namespace

ParamTable match_weights(const std::string& name, const Component& c, const SafetensorsReader& file,
                         const std::string& path, LoadOptions options) {
  const size_t tensors = file.tensors().size();
  bool whole = true;
  ParamTable expected = expected_params(name, c, tensors, whole);
  options.allow_unused |= !whole;
  std::vector<WantedWeight> weights;
  for (const Param& p : expected.params()) weights.push_back({p.path, p.shape});
  std::vector<Misfit> misfits;
  options.misfits = &misfits;
  options.weight_names = weight_names(c);
  try {
    open_weights(file, path, weights, options);
    check(whole, Code::internal, "{}: {} parameters fit {} tensors", c.config_file, weights.size(), tensors);
  } catch (Error& e) {
    const json config = parse_json_or_discard(c.config_text);
    if (!config.is_object()) throw;
    for (const std::string& hint : {about_sizes(misfits, config), about_repeats(expected, whole, misfits, config)})
      if (!hint.empty()) e.note(fmt::format("in {}: {}", c.config_file, hint));
    throw;
  }
  return expected;
}

}  // namespace md
