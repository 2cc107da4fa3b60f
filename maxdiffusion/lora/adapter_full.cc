// ΔW itself. Source: LyCORIS 3.4 (full; names in files).
#include "maxdiffusion/base/error.h"
#include "maxdiffusion/lora/adapter.h"

namespace md {
namespace {

constexpr const char* kDifference = "diff";

class Full : public AddedWeight {
 public:
  std::string_view name() const override { return "full"; }
  std::string_view peft_type() const override { return ""; }
  bool has_rank() const override { return false; }

  std::vector<AdapterPart> parts(const AdapterLayer& l) const override {
    return {{kDifference, l.dims, l.axes, init::zeros()}};
  }
  int64_t rank(const PartDims&) const override { return 0; }

  void check_fits(const AdapterWeights& w, const Dims& dims, const std::string& name) const override {
    const auto found = w.parts.find(kDifference);
    check(found != w.parts.end() && found->second.dims() == dims, Code::io,
          "difference for {}: it is {}, the parameter {}", name,
          found == w.parts.end() ? "missing" : to_string(found->second.dims()), to_string(dims));
  }

  void add_change(const AdapterWeights& w, const WeightRows& rows, std::span<float> sum) const override {
    const std::vector<float> d = float_rows(w.parts.at(kDifference), rows.width, rows.first, rows.count);
    for (size_t i = 0; i < sum.size(); ++i) sum[i] += d[i];
  }

  std::vector<PartName> names() const override { return {{kDifference, kDifference}}; }

 protected:
  Tensor change(const std::map<std::string, Tensor>& parts, const Dims&) const override {
    return parts.at(kDifference);
  }
};

}  // namespace

const Adapter& full_adapter() {
  static const Full kind;
  return kind;
}

}  // namespace md
