// The values of a printed Triton module, statement by statement on the host: a judge of the printer where no GPU is.
// Knows the forms that tiles/triton.cc prints; throws std::runtime_error for any other and for pointers outside of
// their array.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <map>
#include <numeric>
#include <regex>
#include <stdexcept>
#include <string>
#include <vector>

#include "maxdiffusion/base/half.h"
#include "maxdiffusion/tiles/call.h"
#include "maxdiffusion/tiles/triton.h"
#include "tests/ops/evaluate.h"

namespace md {

class TritonModule {
 public:
  explicit TritonModule(const std::string& text) {
    for (size_t at = 0, end; (end = text.find('\n', at)) != std::string::npos; at = end + 1)
      lines_.push_back(text.substr(at, end - at));
  }

  /// Runs all programs of the grid. `arrays`: operands, then results, by argument; results are changed.
  void run(int64_t programs, std::vector<std::vector<double>>& arrays) {
    arrays_ = &arrays;
    for (program_ = 0; program_ < programs; ++program_) {
      values_.clear();
      for (size_t i = 0; i < arrays.size(); ++i)
        values_["%a" + std::to_string(i)] = {{}, {kArray * static_cast<double>(i)}};
      size_t at = 2;
      block(at);
    }
  }

 private:
  static constexpr double kArray = 1LL << 40;  // a pointer is this many times its argument, and the offset
  struct Value {
    Dims dims;
    std::vector<double> v;
  };
  using Names = std::vector<std::string>;

  [[noreturn]] static void fail(const std::string& line) { throw std::runtime_error("not known: " + line); }

  static Names names_in(const std::string& text) {
    static const std::regex name("%[a-z]+[0-9]+(#[0-9]+)?");
    static std::map<std::string, Names> known;  // most lines run many times
    auto [found, is_new] = known.try_emplace(text);
    if (is_new) found->second = {std::sregex_token_iterator(text.begin(), text.end(), name), {}};
    return found->second;
  }
  static std::vector<int64_t> numbers_in(const std::string& text) {
    static const std::regex number("-?[0-9]+");
    std::vector<int64_t> all;
    for (auto i = std::sregex_iterator(text.begin(), text.end(), number); i != std::sregex_iterator(); ++i)
      all.push_back(std::stoll(i->str()));
    return all;
  }
  /// Sizes of the last type of a line: "tensor<16x256xf32>", "f32".
  static Dims last_type(const std::string& line) {
    size_t at = line.rfind("tensor<");
    if (at == std::string::npos || line.find(' ', at) != std::string::npos) return {};
    Dims dims;
    for (at += 7; std::isdigit(static_cast<unsigned char>(line[at]));) {
      size_t digits = 0;
      dims.push_back(std::stoll(line.substr(at, 24), &digits));
      at += digits + 1;
    }
    return dims;
  }
  static size_t elements(const Dims& dims) {
    return static_cast<size_t>(std::accumulate(dims.begin(), dims.end(), int64_t{1}, std::multiplies<>()));
  }
  static bool between(const std::string& line, const std::string& from, const std::string& to, std::string& out) {
    const size_t a = line.find(from);
    if (a == std::string::npos) return false;
    const size_t b = line.find(to, a + from.size());
    out = line.substr(a + from.size(), b - a - from.size());
    return true;
  }

  const Value& at(const std::string& name) const {
    const auto found = values_.find(name);
    if (found == values_.end()) fail("value " + name);
    return found->second;
  }
  void bind(const Names& names, const std::vector<Value>& values) {
    for (size_t i = 0; i < names.size(); ++i) values_[names[i]] = values[i];
  }
  std::vector<Value> all(const Names& names) const {
    std::vector<Value> out;
    for (const std::string& n : names) out.push_back(at(n));
    return out;
  }
  static Names results(const std::string& name, size_t count) {
    Names out;
    for (size_t i = 0; i < count; ++i) out.push_back(count == 1 ? name : name + "#" + std::to_string(i));
    return out;
  }
  /// The line that closes the region which the line before `at` opens: "}" or "} else {".
  size_t end_of(size_t at) const {
    for (int depth = 1; at < lines_.size(); ++at) {
      depth -= lines_[at].starts_with("}");
      if (depth == 0) return at;
      depth += lines_[at].ends_with("{");
    }
    fail("a region without an end");
  }

  /// Runs from line `at` to the end of its region; returns what that yields.
  std::vector<Value> block(size_t at) {
    for (;; ++at) {
      const std::string& line = lines_[at];
      if (line.starts_with("tt.return") || line.starts_with("}") || line == "scf.yield") return {};
      if (line.starts_with("scf.yield")) return all(names_in(line.substr(0, line.find(" : "))));
      const size_t equals = line.find(" = ");
      const std::string result = line[0] == '%' ? line.substr(0, std::min(line.find(':'), equals)) : "",
                        rest = result.empty() ? line : line.substr(equals + 3);
      if (rest.starts_with("scf.for"))
        at = loop(at, result, rest);
      else if (rest.starts_with("scf.if"))
        at = branch(at, result, rest);
      else if (rest.starts_with("\"tt.reduce\""))
        at = reduce(at, result, rest);
      else
        statement(line, result, rest);
    }
  }

  size_t loop(size_t at, const std::string& result, const std::string& rest) {
    const size_t end = end_of(at + 1);
    const Names head = names_in(rest.substr(0, rest.find("step"))), carried_text = [&] {
      std::string inside;
      return between(rest, "iter_args(", ")", inside) ? names_in(inside) : Names();
    }();
    Names arguments, starts;
    for (size_t i = 0; i < carried_text.size(); i += 2)
      arguments.push_back(carried_text[i]), starts.push_back(carried_text[i + 1]);
    std::vector<Value> carried = all(starts);
    const double count = this->at(head[2]).v[0];
    for (double i = this->at(head[1]).v[0]; i < count; ++i) {
      values_[head[0]] = {{}, {i}};
      bind(arguments, carried);
      carried = block(at + 1);
    }
    bind(results(result, carried.size()), carried);
    return end;
  }
  size_t branch(size_t at, const std::string& result, const std::string& rest) {
    const size_t end = end_of(at + 1);
    const bool has_else = lines_[end] == "} else {", yes = this->at(names_in(rest)[0]).v[0] != 0;
    std::vector<Value> out;
    if (yes) out = block(at + 1);
    if (!yes && has_else) out = block(end + 1);
    bind(results(result, out.size()), out);
    return has_else ? end_of(end + 1) : end;
  }
  size_t reduce(size_t at, const std::string& result, const std::string& rest) {
    const Value x = this->at(names_in(rest)[0]);
    const auto axis = static_cast<size_t>(numbers_in(rest.substr(rest.find("axis")))[0]);
    const bool most = lines_[at + 2].find("arith.maximumf") != std::string::npos;
    if (!most && lines_[at + 2].find("arith.addf") == std::string::npos) fail(lines_[at + 2]);
    const int64_t lines = x.dims[1 - axis], along = x.dims[axis];
    Value out{{lines}, {}};
    for (int64_t k = 0; k < lines; ++k) {
      double sum = most ? -HUGE_VAL : 0;
      for (int64_t i = 0; i < along; ++i) {
        const double e = x.v[static_cast<size_t>(axis == 1 ? k * x.dims[1] + i : i * x.dims[1] + k)];
        sum = most ? std::max(sum, e) : sum + e;
      }
      out.v.push_back(sum);
    }
    values_[result] = out;
    return at + 4;
  }

  double& memory(double pointer) {
    const auto array = static_cast<size_t>(pointer / kArray);
    const auto offset = static_cast<int64_t>(pointer - kArray * static_cast<double>(array));
    if (pointer < 0 || array >= arrays_->size() || offset >= std::ssize((*arrays_)[array])) fail("a pointer outside");
    return (*arrays_)[array][static_cast<size_t>(offset)];
  }
  static Value permuted(const Value& x, const std::vector<int64_t>& order) {
    Value out;
    Dims strides(x.dims.size(), 1), from;
    for (size_t i = x.dims.size() - 1; i-- > 0;) strides[i] = strides[i + 1] * x.dims[i + 1];
    for (int64_t axis : order)
      out.dims.push_back(x.dims[static_cast<size_t>(axis)]), from.push_back(strides[static_cast<size_t>(axis)]);
    for (size_t i = 0; i < x.v.size(); ++i) {
      auto left = static_cast<int64_t>(i);
      int64_t source = 0;
      for (size_t d = out.dims.size(); d-- > 0; left /= out.dims[d]) source += left % out.dims[d] * from[d];
      out.v.push_back(x.v[static_cast<size_t>(source)]);
    }
    return out;
  }

  void statement(const std::string& line, const std::string& result, const std::string& rest) {
    const std::string op = rest.substr(0, rest.find(' ')), body = rest.substr(0, rest.find(" : "));
    const Names in = names_in(op == "tt.split" ? rest : body);
    const auto a = [&] { return at(in[0]); };
    Value out{last_type(line), {}};
    const size_t n = elements(out.dims);
    const auto each = [&](const std::function<double(size_t)>& f) {
      for (size_t i = 0; i < n; ++i) out.v.push_back(f(i));
    };
    const auto both = [&](const std::function<double(double, double)>& f) {
      const Value x = at(in[0]), y = at(in[1]);
      each([&](size_t i) { return f(x.v.at(i), y.v.at(i)); });
    };
    static const std::map<std::string, double (*)(double, double)> kBinary = {
        {"arith.addi", [](double x, double y) { return x + y; }},
        {"arith.addf", [](double x, double y) { return x + y; }},
        {"arith.subi", [](double x, double y) { return x - y; }},
        {"arith.subf", [](double x, double y) { return x - y; }},
        {"arith.muli", [](double x, double y) { return x * y; }},
        {"arith.mulf", [](double x, double y) { return x * y; }},
        {"arith.divf", [](double x, double y) { return x / y; }},
        {"arith.divsi", [](double x, double y) { return std::trunc(x / y); }},
        {"arith.remsi", [](double x, double y) { return std::fmod(x, y); }},
        {"arith.maxsi", [](double x, double y) { return std::max(x, y); }},
        {"arith.maximumf", [](double x, double y) { return std::max(x, y); }},
        {"arith.minsi", [](double x, double y) { return std::min(x, y); }},
        {"arith.minimumf", [](double x, double y) { return std::min(x, y); }},
        {"arith.andi", [](double x, double y) { return x != 0 && y != 0 ? 1.0 : 0.0; }}};
    if (const auto f = kBinary.find(op); f != kBinary.end()) {
      both(f->second);
    } else if (op == "tt.get_program_id") {
      out.v = {static_cast<double>(program_)};
    } else if (op == "arith.constant") {
      std::string text = body.substr(op.size() + 1);
      if (text.starts_with("dense<")) text = text.substr(6, text.size() - 7);
      const double value = text == "true"           ? 1
                           : text == "false"        ? 0
                           : text == "0xFF800000"   ? -HUGE_VAL
                           : text.starts_with("0x") ? std::nan("")
                                                    : std::stod(text);
      each([&](size_t) { return value; });
    } else if (op == "arith.extsi" || op == "arith.extf") {
      out = a();
    } else if (op == "arith.truncf") {
      each([&, x = a()](size_t i) {
        return static_cast<double>(bf16_to_float(float_to_bf16(static_cast<float>(x.v[i]))));
      });
    } else if (op == "arith.cmpi") {
      const bool less = rest.find(" slt,") != std::string::npos;
      both([&](double x, double y) { return (less ? x < y : x == y) ? 1.0 : 0.0; });
    } else if (op == "arith.select") {
      each([&, c = a(), x = at(in[1]), y = at(in[2])](size_t i) { return c.v[i] != 0 ? x.v[i] : y.v[i]; });
    } else if (op == "math.exp2" || op == "math.log2") {
      each([&, x = a()](size_t i) { return op == "math.exp2" ? std::exp2(x.v[i]) : std::log2(x.v[i]); });
    } else if (op == "tt.addptr") {
      each([&, p = a(), offset = at(in[1])](size_t i) { return p.v[i] + offset.v[i]; });
    } else if (op == "tt.splat") {
      each([&, x = a()](size_t) { return x.v[0]; });
    } else if (op == "tt.broadcast") {
      each([&, x = a()](size_t i) {
        const auto columns = static_cast<size_t>(out.dims[1]);
        const size_t row = x.dims[0] == 1 ? 0 : i / columns, column = x.dims[1] == 1 ? 0 : i % columns;
        return x.v.at(row * static_cast<size_t>(x.dims[1]) + column);
      });
    } else if (op == "tt.make_range") {
      each([](size_t i) { return static_cast<double>(i); });
    } else if (op == "tt.expand_dims" || op == "tt.reshape") {
      out.v = a().v;
    } else if (op == "tt.load") {
      const Value p = a();
      if (rest.find("tensor<") == std::string::npos) out.dims = {};
      for (double pointer : p.v) out.v.push_back(memory(pointer));
      out.dims = p.dims;
    } else if (op == "tt.store") {
      const Value p = a(), x = at(in[1]);
      for (size_t i = 0; i < p.v.size(); ++i) memory(p.v[i]) = x.v[i];
      return;
    } else if (op == "tt.trans") {
      std::string order;
      between(rest, "array<i32:", ">", order);
      out = permuted(a(), numbers_in(order));
    } else if (op == "tt.split") {
      const Names names = names_in(line.substr(0, line.find(" = ")));
      const Value x = at(in[0]);
      for (size_t half = 0; half < 2; ++half) {
        Value part{out.dims, {}};
        for (size_t i = 0; i < n; ++i) part.v.push_back(x.v[2 * i + half]);
        values_[names[half]] = part;
      }
      return;
    } else if (op == "tt.join") {
      each([&, x = a(), y = at(in[1])](size_t i) { return i % 2 ? y.v[i / 2] : x.v[i / 2]; });
    } else if (op == "tt.dot") {
      const Value x = a(), y = at(in[1]), sum = at(in[2]);
      const int64_t columns = out.dims[1], depth = x.dims[1];
      if (y.dims[0] != depth || x.dims[0] != out.dims[0] || y.dims[1] != columns) fail(line);
      each([&](size_t i) {
        double s = sum.v[i];
        const auto r = static_cast<int64_t>(i) / columns, c = static_cast<int64_t>(i) % columns;
        for (int64_t k = 0; k < depth; ++k)
          s += x.v[static_cast<size_t>(r * depth + k)] * y.v[static_cast<size_t>(k * columns + c)];
        return s;
      });
    } else {
      fail(line);
    }
    if (out.v.size() != elements(out.dims)) fail("sizes of " + line);
    values_[result] = out;
  }

  std::vector<std::string> lines_;
  std::map<std::string, Value> values_;
  std::vector<std::vector<double>>* arrays_ = nullptr;
  int64_t program_ = 0;
};

/// Expects that the program's Triton module computes what its StableHLO computes. `tolerance`: of the largest value.
inline void expect_same_from_triton(const tiles::Program& p, const std::vector<HostArray>& in, double tolerance) {
  std::vector<std::vector<double>> arrays;
  for (const HostArray& a : in) arrays.push_back(a.to_doubles());
  for (const Shape& s : p.results()) arrays.emplace_back(static_cast<size_t>(s.elements()), std::nan(""));
  int64_t programs = 1;
  for (size_t d = 0; d + static_cast<size_t>(p.sequential()) < p.grid().size(); ++d) programs *= p.grid()[d];
  TritonModule(tiles::triton_text(p)).run(programs, arrays);
  const auto expected = evaluate(in, [&](Graph&, const std::vector<Tensor>& x) { return tiles::call(p, x); });
  for (size_t i = 0; i < expected.size(); ++i) {
    const auto e = expected[i].to_doubles(), &is = arrays[in.size() + i];
    double most = 0, error = 0;
    for (size_t k = 0; k < e.size(); ++k) {
      ASSERT_EQ(std::isnan(e[k]), std::isnan(is[k])) << p.name() << ", result " << i << " at " << k;
      if (std::isnan(e[k])) continue;
      most = std::max(most, std::abs(e[k]));
      error = std::max(error, std::abs(e[k] - is[k]));
    }
    EXPECT_LE(error, tolerance * most) << p.name() << ", result " << i;
  }
}

}  // namespace md
