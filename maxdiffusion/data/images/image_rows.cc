#include "maxdiffusion/data/images/image_rows.h"

#include <algorithm>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/log.h"

namespace md {
namespace {

/// Stacks the arrays called `name` of all rows and removes them from the rows: memory holds little more than one copy.
HostArray joined(std::vector<ImageRow>& rows, const std::string& name) {
  const Shape first = rows[0].arrays.at(name).shape();
  Dims dims = first.dims;
  dims.insert(dims.begin(), static_cast<int64_t>(rows.size()));
  HostArray all(Shape{first.dtype, dims});
  std::byte* to = all.mutable_data();
  for (ImageRow& r : rows) {
    auto it = r.arrays.find(name);
    check(it != r.arrays.end() && it->second.shape() == first, Code::io, "{}: '{}' is {}; in {} it is {}", r.name, name,
          it == r.arrays.end() ? "absent" : to_string(it->second.shape()), rows[0].name, to_string(first));
    to = std::copy_n(it->second.data(), it->second.bytes(), to);
    it->second = {};
  }
  return all;
}

}  // namespace

HostArrays stack_rows(std::vector<ImageRow>& rows) {
  HostArrays out;
  for (const auto& [name, first] : rows[0].arrays) out.emplace(name, HostArray());
  for (auto& [name, a] : out) a = joined(rows, name);
  return out;
}

void ReadingProgress::step() {
  const int64_t done = ++done_;
  const std::lock_guard lock(mutex_);
  const auto now = std::chrono::steady_clock::now();
  if (now - last_ < std::chrono::seconds(5)) return;
  last_ = now;
  log_info("read {}{} images", done, total_ < 0 ? "" : fmt::format(" of {}", total_));
}

}  // namespace md
