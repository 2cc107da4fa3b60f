#include "maxdiffusion/graph/statements.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>
#include <iterator>
#include <unordered_map>
#include <unordered_set>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/graph/emit.h"

namespace md {
namespace {

constexpr int kNone = -1;

int number_of(const Value& v) {
  int number = kNone;
  std::from_chars(v.name.data() + 1, v.name.data() + v.name.size(), number);
  return number;
}

/// "%1, %2".
std::string names_of(const std::vector<Value>& values) {
  std::string text;
  for (const Value& v : values) text += (text.empty() ? "" : ", ") + v.name;
  return text;
}

/// "[dense<[1, 0]> : tensor<2xindex>]", one per shape.
std::string layouts_of(const std::vector<Shape>& shapes, const std::vector<Axes>& layouts = {}) {
  std::string text;
  for (size_t i = 0; i < shapes.size(); ++i) {
    Axes order;
    for (int64_t a = shapes[i].rank(); layouts.empty() && a-- > 0;) order.push_back(a);
    if (!layouts.empty()) order = layouts[i];
    text += fmt::format("{}dense<[{}]> : tensor<{}xindex>", i ? ", " : "", fmt::join(order, ", "), order.size());
  }
  return "[" + text + "]";
}

std::string aliases(const CustomCall& call) {
  std::string text;
  for (auto [result, operand] : call.in_place) {
    text += text.empty() ? "" : ", ";
    text += "#stablehlo.output_operand_alias<output_tuple_indices = [" +
            (call.results.size() > 1 ? std::to_string(result) : "") + "], operand_index = " + std::to_string(operand) +
            ", operand_tuple_indices = []>";
  }
  return "[" + text + "]";
}

std::string attributes_of(const CustomCall& call, const std::vector<Value>& operands) {
  std::vector<Shape> shapes;
  for (const Value& v : operands) shapes.push_back(v.shape);
  const std::string config = call.config_is_text ? mlir_string(call.backend_config) : "{" + call.backend_config + "}";
  return fmt::format(
      "call_target_name = \"{}\", api_version = {} : i32, has_side_effect = {}, operand_layouts = {}, "
      "result_layouts = {}, output_operand_aliases = {}, backend_config = {}",
      call.target, call.config_is_text ? 2 : 4, call.has_side_effect, layouts_of(shapes),
      layouts_of(call.results, call.layouts), aliases(call), config);
}

/// `names = "op"(operands) (regions) {attributes} : (types) -> types location`, a line.
void append(std::string& t, std::string_view names, std::string_view op, const std::vector<Value>& operands,
            const std::vector<Shape>& results, std::string_view attributes, std::string_view location,
            const std::vector<std::string>& regions = {}) {
  t += names;
  if (!results.empty()) t += " = ";
  t += '"';
  t += op;
  t += "\"(";
  for (size_t i = 0; i < operands.size(); ++i) {
    if (i) t += ", ";
    t += operands[i].name;
  }
  t += ")";
  if (!regions.empty()) {
    t += " (";
    for (size_t i = 0; i < regions.size(); ++i) {
      if (i) t += ", ";
      t += regions[i];
    }
    t += ")";
  }
  if (!attributes.empty()) {
    t += " {";
    t += attributes;
    t += "}";
  }
  t += " : (";
  for (size_t i = 0; i < operands.size(); ++i) {
    if (i) t += ", ";
    append_type(t, operands[i].shape);
  }
  t += ") -> ";
  if (results.size() != 1) t += "(";
  for (size_t i = 0; i < results.size(); ++i) {
    if (i) t += ", ";
    append_type(t, results[i]);
  }
  if (results.size() != 1) t += ")";
  t += location;
  t += "\n";
}

/// XLA_FFI_DataType of the element types that kernels know.
int ffi_type(DType t) {
  switch (t) {
    case DType::s8: return 2;
    case DType::s32: return 4;
    case DType::u8: return 6;
    case DType::f32: return 11;
    case DType::bf16: return 16;
    case DType::f8e4m3fn: return 20;
    default: fail(Code::internal, "fused calls: no kernel supports arrays of {}", to_string(t));
  }
}

}  // namespace

void append_type(std::string& text, const Shape& shape) {
  text += "tensor<";
  for (int64_t d : shape.dims) {
    char digits[24];
    text.append(digits, std::to_chars(digits, digits + sizeof digits, d).ptr);
    text += 'x';
  }
  text += mlir_name(shape.dtype);
  text += '>';
}

std::vector<Value> Statements::add(std::string_view op, const std::vector<Value>& operands,
                                   const std::vector<Shape>& results, std::string_view attributes,
                                   std::string_view location, int& next_number, const std::vector<std::string>& regions,
                                   std::vector<int> used_inside) {
  Statement s{.begin = text_.size(), .uses = std::move(used_inside), .live = results.empty() || !regions.empty()};
  for (const Value& v : operands) s.uses.push_back(number_of(v));
  std::vector<Value> out;
  std::string names;
  if (!results.empty()) {
    s.first = next_number++;
    s.results = 1;
    names = "%" + std::to_string(s.first);
    if (results.size() == 1) {
      out.push_back({names, results[0]});
    } else {
      for (size_t i = 0; i < results.size(); ++i) out.push_back({names + "#" + std::to_string(i), results[i]});
      names += ":" + std::to_string(results.size());
    }
  }
  s.is_view = op == "stablehlo.reshape";
  if (s.is_view && of_calls_.contains(s.uses[0])) of_calls_.insert(s.first);
  append(text_, names, op, operands, results, attributes, location, regions);
  s.end = text_.size();
  all_.push_back(std::move(s));
  return out;
}

std::vector<Value> Statements::add_call(const CustomCall& call, const std::vector<Value>& operands,
                                        std::string_view location, int& next_number) {
  Statement s{.begin = text_.size(),
              .first = next_number,
              .results = static_cast<int>(call.results.size()),
              .live = call.has_side_effect || call.results.empty()};
  for (const Value& v : operands) s.uses.push_back(number_of(v));
  std::vector<Value> out;
  for (const Shape& shape : call.results) out.push_back({"%" + std::to_string(next_number++), shape});
  append(text_, names_of(out), "stablehlo.custom_call", operands, call.results, attributes_of(call, operands),
         location);
  s.end = text_.size();
  if (!call.fused_by.empty()) {
    s.call = static_cast<int>(calls_.size());
    for (int i = 0; i < s.results; ++i) of_calls_.insert(s.first + i);
    calls_.push_back({call, operands, out, std::string(location)});
  }
  all_.push_back(std::move(s));
  return out;
}

bool Statements::is_call_result(const Value& v) const { return of_calls_.contains(number_of(v)); }

std::vector<int> Statements::uses() const {
  std::vector<int> all;
  for (const Statement& s : all_) all.insert(all.end(), s.uses.begin(), s.uses.end());
  return all;
}

/// Selects the statements to print, their order, and the groups printed as one.
class Statements::Joining {
 public:
  Joining(const Statements& block, int& next_number) : b_(block), next_number_(next_number) {}
  std::string text() {
    find_live();
    group();
    find_live();  // omits views that only calls of the same fused call read
    std::string out;
    for (const std::vector<int>& item : order_) {
      const auto live = [&](int s) { return live_.contains(s); };
      std::vector<int> members;
      std::ranges::copy_if(item, std::back_inserter(members), live);
      if (members.size() == 1) {
        const Statement& s = at(members[0]);
        out.append(b_.text_, s.begin, s.end - s.begin);
      } else if (!members.empty()) {
        print_run(members, out);
      }
    }
    return out;
  }

 private:
  const Statement& at(int s) const { return b_.all_[static_cast<size_t>(s)]; }
  const Call& call(int s) const { return b_.calls_[static_cast<size_t>(at(s).call)]; }

  /// If `number` is a view of a value of the reader's fused call: that value; else `number`.
  int origin(int reader, int number) const {
    const auto of_reader = run_.find(reader);
    if (of_reader == run_.end()) return number;
    int n = number;
    for (auto view = view_of_.find(n); view != view_of_.end(); view = view_of_.find(n)) n = view->second;
    const auto maker = maker_.find(n);
    if (maker == maker_.end()) return number;
    const auto of_maker = run_.find(maker->second);
    return of_maker != run_.end() && of_maker->second == of_reader->second ? n : number;
  }

  void find_live() {
    std::unordered_set<int> used;
    live_.clear();
    // In reverse order of printing, so that users are visited before the statements they use.
    for (int s = static_cast<int>(b_.all_.size()); s-- > 0;) {
      const Statement& x = at(s);
      bool live = x.live;
      for (int i = 0; i < x.results && !live; ++i) live = used.contains(x.first + i);
      if (!live) continue;
      live_.insert(s);
      for (int u : x.uses) used.insert(origin(s, u));
    }
  }

  /// Largest number of calls in a run: its inputs and results stay in memory until it ends.
  static constexpr size_t kMost = 32;

  /// Fills order_ and run_. One run is open at a time; statements that depend on it without belonging to it are printed
  /// after it.
  void group() {
    std::vector<int> members, behind;
    std::unordered_set<int> of_run, of_behind;  // values
    auto close = [&] {
      for (int m : members) run_[m] = static_cast<int>(order_.size());
      if (!members.empty()) order_.push_back(std::exchange(members, {}));
      for (int s : behind) order_.push_back({s});
      behind.clear();
      of_run.clear();
      of_behind.clear();
    };
    for (int s = 0; s < static_cast<int>(b_.all_.size()); ++s) {
      const Statement& x = at(s);
      for (int i = 0; i < x.results; ++i) maker_[x.first + i] = s;
      if (!live_.contains(s)) continue;
      auto any = [&](const std::unordered_set<int>& values) {
        return std::ranges::any_of(x.uses, [&](int u) { return values.contains(u); });
      };
      const bool waits = any(of_behind);
      if (x.call != kNone) {
        if (waits || members.size() == kMost ||
            (!members.empty() && call(members[0]).call.fused_by != call(s).call.fused_by))
          close();
        members.push_back(s);
        for (int i = 0; i < x.results; ++i) of_run.insert(x.first + i);
      } else if (!waits && !any(of_run)) {
        order_.push_back({s});
      } else {
        behind.push_back(s);
        // Calls of the run may read a view's operand directly.
        if (x.is_view && !waits) view_of_[x.first] = x.uses[0];
        for (int i = 0; i < x.results; ++i) (x.is_view && !waits ? of_run : of_behind).insert(x.first + i);
      }
    }
    close();
  }

  /// Location of a value of the fused call: index of an operand or result, or an offset in the scratch memory.
  struct Place {
    int array;
    int64_t offset = 0;
  };

  void print_run(const std::vector<int>& members, std::string& out) {
    const int size = static_cast<int>(members.size());
    const int run = run_.at(members[0]);
    // The last reader of each value within the run, and the values that are read outside of it.
    std::unordered_map<int, int> last_reader;
    for (int m = 0; m < size; ++m)
      for (int u : at(members[static_cast<size_t>(m)]).uses)
        last_reader[origin(members[static_cast<size_t>(m)], u)] = m;
    std::vector<Value> operands, results;
    std::unordered_map<std::string, int> operand_at;
    std::unordered_map<int, Place> places;  // results: index from 0 until the number of operands is known
    Turns turns;
    for (int m = 0; m < size; ++m) {
      const int s = members[static_cast<size_t>(m)];
      for (const Value& v : call(s).operands)
        if (!computed_in(run, s, v) && operand_at.emplace(v.name, operands.size()).second) operands.push_back(v);
      for (const Value& v : call(s).results) {
        const int n = number_of(v);
        if (read_outside(run, n)) {
          places[n] = {static_cast<int>(results.size())};
          results.push_back(v);
        } else {
          const auto last = last_reader.find(n);
          places[n] = {kNone, turns.take(v.shape.bytes(), m, last == last_reader.end() ? m : last->second)};
        }
      }
    }
    CustomCall joined{.target = std::string(call(members[0]).call.fused_by), .results = {}, .backend_config = {}};
    if (turns.bytes() > 0) results.push_back({"%" + std::to_string(next_number_++), Shape{DType::u8, {turns.bytes()}}});
    for (const Value& v : results) joined.results.push_back(v.shape);
    const int shared = static_cast<int>(operands.size() + results.size()) - 1;
    for (int m = 0; m < size; ++m) {
      const int s = members[static_cast<size_t>(m)];
      std::vector<int64_t> arrays;
      auto describe = [&](const Value& v, Place p) {
        arrays.insert(arrays.end(), {p.array, p.offset, ffi_type(v.shape.dtype), v.shape.rank()});
        arrays.insert(arrays.end(), v.shape.dims.begin(), v.shape.dims.end());
      };
      auto describe_result = [&](const Value& v, int number) {
        Place p = places.at(number);
        p.array = p.array == kNone ? shared : p.array + static_cast<int>(operands.size());
        describe(v, p);
      };
      for (const Value& v : call(s).operands)
        if (computed_in(run, s, v))
          describe_result(v, origin(s, number_of(v)));
        else
          describe(v, {operand_at.at(v.name)});
      for (const Value& v : call(s).results) describe_result(v, number_of(v));
      joined.backend_config += fmt::format(
          "{}c{:04} = {{kernel = \"{}\", operands = {} : i64, arrays = {}, attributes = {{{}}}}}", m ? ", " : "", m,
          call(s).call.target, call(s).operands.size(), mlir_array(arrays), call(s).call.backend_config);
    }
    append(out, names_of(results), "stablehlo.custom_call", operands, joined.results, attributes_of(joined, operands),
           call(members[0]).location);
  }

  /// Allocation of scratch memory: a value occupies its bytes from the call that computes it to the last one that reads
  /// it.
  class Turns {
   public:
    int64_t take(int64_t bytes, int first, int last) {
      constexpr int64_t kLine = 64;
      bytes = (bytes + kLine - 1) / kLine * kLine;
      std::erase_if(allocated_, [&](const Allocation& t) { return t.last < first; });
      std::ranges::sort(allocated_, {}, &Allocation::offset);
      int64_t offset = 0;
      for (const Allocation& t : allocated_) {
        if (t.offset - offset >= bytes) break;
        offset = std::max(offset, t.offset + t.bytes);
      }
      allocated_.push_back({offset, bytes, last});
      all_ = std::max(all_, offset + bytes);
      return offset;
    }
    int64_t bytes() const { return all_; }

   private:
    struct Allocation {
      int64_t offset, bytes;
      int last;
    };
    std::vector<Allocation> allocated_;
    int64_t all_ = 0;
  };

  bool computed_in(int run, int reader, const Value& v) const {
    const auto maker = maker_.find(origin(reader, number_of(v)));
    if (maker == maker_.end()) return false;
    const auto of_maker = run_.find(maker->second);
    return of_maker != run_.end() && of_maker->second == run;
  }

  bool read_outside(int run, int number) {
    if (readers_.empty())
      for (int s : live_) {
        const auto run_of_s = run_.find(s);
        for (int u : at(s).uses) readers_[origin(s, u)].insert(run_of_s == run_.end() ? kNone : run_of_s->second);
      }
    const auto found = readers_.find(number);
    return found != readers_.end() && std::ranges::any_of(found->second, [&](int reader) { return reader != run; });
  }

  const Statements& b_;
  int& next_number_;
  std::unordered_set<int> live_;
  std::vector<std::vector<int>> order_;                       // statements; several: a run
  std::unordered_map<int, int> run_;                          // statement → its run
  std::unordered_map<int, int> maker_;                        // value → statement
  std::unordered_map<int, int> view_of_;                      // value → value
  std::unordered_map<int, std::unordered_set<int>> readers_;  // value → runs that read it; kNone: other statements
};

std::string Statements::text(int& next_number) const {
  return calls_.size() < 2 ? text_ : Joining(*this, next_number).text();
}

}  // namespace md
