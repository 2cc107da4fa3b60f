#include "maxdiffusion/data/records/data_identity.h"

#include <fmt/format.h>

#include "maxdiffusion/base/files.h"
#include "maxdiffusion/base/shortened.h"

namespace md {
namespace {

std::string combined(const std::string& a, const std::string& b) {
  return a.empty() && b.empty() ? "" : content_hash(a + " " + b);
}

}  // namespace

DataIdentity combined(const DataIdentity& a, const DataIdentity& b) {
  return {.samples = a.samples < 0 || b.samples < 0 ? -1 : a.samples + b.samples,
          .names = combined(a.names, b.names),
          .captions = combined(a.captions, b.captions),
          .files = combined(a.files, b.files)};
}

std::string change_between(const DataIdentity& then, const DataIdentity& now) {
  if (then == now || then == DataIdentity() || now == DataIdentity()) return "";
  if (then.samples >= 0 && now.samples >= 0 && then.samples != now.samples)
    return fmt::format("it had {} and has {}", counted(then.samples, "sample"), now.samples);
  const std::string all = now.samples < 0 ? "samples" : counted(now.samples, "sample");
  if (then.names.empty() != now.names.empty() || then.files.empty() != now.files.empty())
    return "it is data of another kind";
  if (then.names != now.names) return fmt::format("its {} have other names", all);
  if (then.files != now.files) return fmt::format("the files of its {} have other names or sizes", all);
  return then.captions != now.captions ? fmt::format("its {} have other captions", all) : "";
}

}  // namespace md
